"""Facts about how a variant ran, besides its figures: stored with each result, and read by code. Notes that only people
read are in `recorded`."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Literal, Self

from pydantic import Field, JsonValue, field_validator

from optigpu.documents.load import LoadFacts, ScenarioName
from optigpu.documents.peaks import RooflineFacts
from optigpu.documents.shapes import Footprint, ImageFootprint
from optigpu.vocabulary import Document, Frozen

NOT_RECORDED = "The measuring process did not record it."
NO_MODEL = "The workload runs no model."
EXPLAINED = ("dtype", "attention_kernels", "threads", "weights", "footprint")
"""Fields of RunFacts whose null always has a reason."""


class WeightFacts(Frozen):
    """Which weights were measured. A null `hash` or `revision` has its reason in `reasons`, by the field's name."""

    # Bytes of the weights with the stack applied; what several layers share counts once.
    bytes: int | None = None
    # Number of weights before the stack changed them.
    parameters: int | None = None
    # Share of these that the stack's technique of weights quantized, or that a file holds in 8 bits and fewer; a table
    # counts where its product is quantized. Null: nothing is quantized, or the engine does not say.
    quantized: float | None = None
    # Number of weights that training changes, with the stack applied; null: the workload trains nothing.
    trainable: int | None = None
    # SHA-256 of the files that the weights came from, or of the recipe that drew random ones.
    hash: str | None = None
    # Which of the two `hash` is.
    hash_of: Literal["files", "recipe"] | None = None
    # SHA-256 of each file by its name; empty for random weights.
    files: dict[str, str] = Field(default_factory=dict)
    # Tensors of the files that the model has no place for, the first by their names; null: none, or it is not known.
    unused: str | None = None
    # A hub's commit, or the digest of a preset's architecture.
    revision: str | None = None
    reasons: dict[str, str] = Field(default_factory=dict)


FROM_FILE = "file"
"""The family of a network that came from a file."""


class NetworkFacts(Frozen):
    """Which network an image classifier is, whatever its weights are."""

    # transformers' model_type, or the family of a converted model's manifest; FROM_FILE: which is not known.
    family: str
    # The width multiplier as it was written ("0.35"); null: the full width.
    alpha: str | None = None
    # [height, width, channels] of an image.
    input: tuple[int, ...]
    classes: int | None = None

    @classmethod
    def of_manifest(cls, manifest: Document) -> Self:
        """The network in the manifest of a converted model, which is read as it was stored."""
        network = manifest["network"]
        return cls.model_validate({name: network.get(name) for name in cls.model_fields})

    @property
    def label(self) -> str:
        """`mobilenet_v2 alpha 0.35, 96x96x3, 10 classes`."""
        width = f" alpha {self.alpha}" if self.alpha else ""
        classes = f", {self.classes} classes" if self.classes else ""
        return f"{self.family}{width}, {'x'.join(map(str, self.input))}{classes}"

    def has_body_of(self, other: "NetworkFacts") -> bool:
        """Whether both are known to be the same network but for the number of classes."""
        return self.family != FROM_FILE and self._body == other._body

    @property
    def _body(self) -> tuple[str, float, tuple[int, ...]]:
        """1.0 and 1 are the same width."""
        return self.family, float(self.alpha or 1), self.input


class QualityFacts(Frozen):
    """How precisely quality was measured: by how far its figures move without one part of the text, images or items."""

    # 95% intervals over windows (images, items), by the metric's name.
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)
    # Each figure without one part after the other; two results on the same text are compared part by part.
    without_part: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    # Why a figure has no interval.
    no_interval: dict[str, str] = Field(default_factory=dict)


class TextQuality(QualityFacts):
    """On what text quality was measured, and how precisely."""

    # The text's name as `measure.quality.text` has it.
    text: str
    # Where a dataset was read; null for a text that the fp32 model wrote itself.
    dataset: str | None
    dataset_sha256: str | None
    # SHA-256 of the tokens: figures of two results compare only where it is equal.
    tokens_sha256: str
    # Predicted tokens, and the first of them whose whole distributions were compared with fp32's.
    positions: int
    kld_positions: int
    # Tokens of a window, and how far windows begin apart; null where they do not overlap.
    window: int
    stride: int | None
    batch_size: int
    # Contexts that lost their beginning to fit the window.
    contexts_cut: int
    # Standard error of kld_mean over positions; null for a single position.
    kld_standard_error: float | None = None
    # The fp32 model's own figures; null where the text has no perplexity, or is no test.
    fp32_perplexity: float | None = None
    fp32_accuracy: float | None = None
    accuracy_standard_error: float | None = None
    # Items of a multiple-choice test.
    items: int | None = None


class ImageQuality(QualityFacts):
    """On what images quality was measured, and how precisely."""

    # How many images, and how they were made, or which folder they are from.
    images: int
    of: str
    # SHA-256 of a folder of labelled images; null for images that were made.
    dataset_sha256: str | None = None
    # The fp32 model's own figure and the standard error of this one's; null where images have no labels.
    fp32_accuracy: float | None = None
    accuracy_standard_error: float | None = None
    # Standard error of kld_mean over images; null for a single image.
    kld_standard_error: float | None = None


class PictureFacts(Frozen):
    """The folder of labelled images that was classified."""

    # Its name under the datasets folder, and SHA-256 of the names, labels and contents of its files.
    folder: str
    sha256: str
    images: int
    # How labels were matched with the model's classes, and how pixels became inputs.
    labels: str
    preprocessing: str


class LossQuality(QualityFacts):
    """How the losses of training compare with fp32's from the same weights, over the samples of its first seed."""

    # The loss of each step, and fp32's; those of the variant end before one that is not finite.
    losses: tuple[float, ...]
    fp32_losses: tuple[float, ...]
    # How many seeds fp32 was trained with, and how far another seed would be, in nats: window means, and single steps.
    seeds: int
    band: float
    jitter_band: float
    # By how much fp32's loss fell from the first window to the last, in nats.
    fall: float
    # The distances from fp32's curve as shares of what is allowed; null where a loss is not finite.
    course: float | None = None
    jitter: float | None = None
    # The first step, from 1, whose loss is not finite; null: all are.
    not_finite_step: int | None = None


class TrainingFacts(Frozen):
    """What a step of training computes."""

    # Operations of matrix products and convolutions: those that the model needs, and all that were executed.
    model_flops: float
    hardware_flops: float


class HostPeak(Frozen):
    """How the host's peak memory was read."""

    # What the peak contains.
    scope: str
    # The kernel's high-water mark, or samples and why.
    source: str
    # The largest resident set among the samples, and how many there were.
    sampled_bytes: int
    samples: int


class EnergyFacts(Frozen):
    """How energy was read."""

    # The sensor, and which parts of the machine it counts.
    source: str
    scope: str
    # The sensor's smallest step; null where power is integrated.
    resolution_j: float | None
    # How often the sensor was read while requests ran, and how often it had changed.
    looks: int
    changes: int
    # Seconds from one change to the next, the median; no less than the time between two looks.
    update_period_s: float | None = None
    # How long requests ran, and how many of them.
    window_s: float
    requests: int
    # Power at rest, and how long it was read.
    idle_w: float
    idle_s: float


class MeterFacts(Frozen):
    """How the meters read their figures."""

    # Null where quality was not measured; a metric's own reason says why.
    quality: TextQuality | ImageQuality | LossQuality | None = None
    # Null where memory was not measured.
    host_peak: HostPeak | None = None
    # Null where energy was not measured.
    energy: EnergyFacts | None = None
    # What is noted for people, by name; no code reads it.
    recorded: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("recorded", mode="before")
    @classmethod
    def _plain(cls, notes: Mapping[str, object]) -> JsonValue:
        return plain(notes)


def plain(note: object) -> JsonValue:
    """A note as plain JSON: sets as lists, and as text what JSON has no word for. It must never cost the
    measurement."""
    if note is None or isinstance(note, bool):
        return note
    if isinstance(note, Mapping):
        return {str(name): plain(value) for name, value in note.items()}
    if isinstance(note, (list, tuple, set, frozenset)):
        return [plain(value) for value in note]
    if isinstance(note, Integral):
        return int(note)
    if isinstance(note, Real) and math.isfinite(note):
        return float(note)
    return str(note)


class BuildFacts(Frozen):
    """What the library that computes was really built with, whatever its package is called."""

    # The package that brought it, and the file.
    package: str
    library: str
    # How many instructions of each set it has ("avx512", "vnni", "amx"); null: `reason` says why they were not counted.
    instructions: dict[str, int] | None = None
    # The architectures of GPUs that it has code for ("sm_90", "compute_90"); empty: it has none, or no GPU was used.
    cuda: tuple[str, ...] = ()
    # What this machine has, a right build uses, and this library lacks.
    lacks: tuple[str, ...] = ()
    # The command that builds it right; null where it lacks nothing.
    build: str | None = None
    reason: str | None = None


class WarmUpFacts(Frozen):
    """How one process warmed up: requests before the first timed one, and whether the last of them agreed."""

    requests: int
    steady: bool


class RunFacts(MeterFacts):
    """How a variant ran: what its first process, its meters and the conductor recorded. What a backend does not know is
    null, and `reasons` says why by the field's name; a null that means "none is used" needs no reason."""

    # The weights' dtype as they were loaded ("float32"), before the stack replaced layers.
    dtype: str | None = None
    # The dtype that autocast computes in; null: no autocast.
    autocast: str | None = None
    # torch's autograd mode: "no_grad", "inference" or "grad"; null for an engine without autograd.
    autograd: str | None = None
    # True where cuDNN computes float32 convolutions in TF32; null: the model has no convolution, or runs on no GPU.
    cudnn_tf32: bool | None = None
    # torch's precision of float32 matrix products where a technique has set it ("high": TF32); null: "highest".
    float32_matmul_precision: str | None = None

    # The key-value cache: "dynamic", "static", "none" (all is computed again for each token), or what an engine calls
    # its own; null: the workload has no use for one.
    kv_cache: str | None = None
    # The dtype of cached keys and values; null: the one that is computed with.
    kv_cache_dtype: str | None = None
    # Bytes of one token's keys and values over all layers; null: they follow from the shapes and the dtype.
    kv_cache_bytes_per_token: int | None = None
    # The most tokens of a sequence that the cache keeps, and how many of them are its first; null: all tokens.
    kv_cache_tokens: int | None = None
    kv_cache_sinks: int | None = None

    # transformers' attn_implementation ("sdpa", "eager"); null: the model has none.
    attn_implementation: str | None = None
    # The attention operators and kernels that ran, by the profiler's names; empty: none ran.
    attention_kernels: tuple[str, ...] | None = None

    # The floating-point numbers that torch's operators multiplied in one observed request; null: not observed.
    product_dtypes: tuple[str, ...] | None = None
    # Whether the GPU computed in that request: it ran kernels, and at least half of torch's matrix products; null: on
    # a CPU, or not observed.
    device_kernels: bool | None = None

    # Whose decode loop ran; null: the workload decodes nothing.
    decode_loop: str | None = None
    # The operator that replaced the model's decode step; null: the model's own modules ran.
    decode_operator: str | None = None
    # The mean of tokens that one pass gave; null: always one.
    tokens_per_pass: float | None = None

    # CPU threads of the measuring process.
    threads: int | None = None
    # The nice value of timed requests: -20 is the highest priority, 0 the usual one.
    nice: int | None = None
    # What the measuring process could reach: the host's network, or loopback of its own alone; null: not known.
    reach: Literal["network", "loopback"] | None = None
    # Versions of the engine's libraries, by package name.
    versions: dict[str, str] = Field(default_factory=dict)

    # What the libraries that computed were built with; empty: not known of this engine.
    builds: tuple[BuildFacts, ...] = ()

    # How many tokens a text prompt has; null: prompts are random, as long as the workload says.
    prompt_tokens: int | None = None
    # MLPerf's scenario, or that of a load; null: the workload has none.
    scenario: ScenarioName | None = None
    # How requests arrived over time and what the queue did; null: the workload is no load.
    load: LoadFacts | None = None
    # [channels, height, width] of an image; null: the workload takes none.
    image_shape: tuple[int, int, int] | None = None
    # The folder whose images were classified; null: images are random.
    pictures: PictureFacts | None = None
    # Which network classified images, so that the edge leaderboard finds it; null: the workload classifies none.
    network: NetworkFacts | None = None

    # Which weights were measured.
    weights: WeightFacts | None = None
    # What a step reads of the model.
    footprint: Footprint | ImageFootprint | None = None
    # What a step of training computes; null: the workload trains nothing, or its engine cannot count it.
    training: TrainingFacts | None = None
    # What layers multiply that train in another dtype than the model's.
    training_dtypes: tuple[str, ...] = ()

    # How each process warmed up, in the order of the replicates.
    warmup: tuple[WarmUpFacts, ...] = ()
    # Indices of the variants whose processes were resident together with this one's, its own included.
    side_by_side: tuple[int, ...] = ()
    # Times within requests (of each token) by name: count, quantiles and extremes in seconds. They only describe.
    described: dict[str, dict[str, float]] = Field(default_factory=dict)
    # How far the variant is from what the machine can do; null until it is judged.
    roofline: RooflineFacts | None = None

    # Why a field is null, by the field's name.
    reasons: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def gathered(cls, noted: Mapping[str, object], unknown: str = NOT_RECORDED) -> Self:
        """Facts from notes by name: those that are no field go into `recorded`. A field of EXPLAINED that nothing fills
        gets the reason `unknown`, unless `reasons` has one. Raises ValidationError for a note of another type."""
        known = {name: value for name, value in noted.items() if name in cls.model_fields}
        others = {name: value for name, value in noted.items() if name not in known}
        found = cls.model_validate({"recorded": others} | known)
        missing = {name: unknown for name in EXPLAINED if getattr(found, name) is None}
        return found.model_copy(update={"reasons": missing | found.reasons})

    def with_readings(self, *readings: MeterFacts) -> Self:
        """These facts and those of the meters; of two meters that read the same, the later one counts."""
        found = {name: value for reading in readings for name, value in reading if value is not None}
        notes = [self.recorded, *(reading.recorded for reading in readings)]
        recorded = {name: value for each in notes for name, value in each.items()}
        return self.model_copy(update=found | {"recorded": recorded})

    def why_null(self, name: str) -> str:
        """The reason why a field is null."""
        return self.reasons.get(name, NOT_RECORDED)
