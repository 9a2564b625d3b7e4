"""Facts about how a variant ran, besides its figures: stored with each result, and read by code, as are the shapes of
models as counts, and what one step reads of a loaded model. Notes that only people read are in `recorded`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, Self

from pydantic import Field, JsonValue, field_validator

from optigpu.documents.peaks import RooflineFacts
from optigpu.documents.rounds import LoadFacts, ScenarioName
from optigpu.vocabulary import Document, Frozen

_MOST_TOKENS = 2**20


@dataclass(frozen=True)
class AttentionWork:
    """What the layers do together that reach back `window` tokens (None: all of them): operations for a pair of a query
    and a key, and numbers of keys and values that they keep of a token."""

    window: int | None
    flops: int
    kept: int


@dataclass(frozen=True)
class TokenWork:
    """A decoder's operations: `flops` of products with weights for a token, `head_flops` of those behind the blocks for
    a prediction, and those of attention. They hold for texts of at most `longest` tokens, None for any: in longer ones
    layers choose what they attend to."""

    flops: int
    head_flops: int
    attention: tuple[AttentionWork, ...]
    longest: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A decoder's shapes, as counts; `context` is in tokens, None for any number. Without attention there are no heads,
    and a head size of 0. `family` is transformers' model_type ("gpt2"). `inner_size` is the width of the MLP, whose
    matrices are two, or three where it is gated; both are None for a family whose blocks are not known.
    `embedding_size` is the width of a row of the embedding and of the head, which some OPT models project to
    `hidden_size`. `work` is counted where a roofline asks for it, or `uncounted` says why it cannot be."""

    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int | None
    tied_head: bool
    head_size: int
    inner_size: int | None
    gated_mlp: bool | None
    embedding_size: int
    work: TokenWork | None = None
    uncounted: str | None = None

    @property
    def longest(self) -> int:
        """The most tokens of a sequence: its context, and 2 ** 20 for a model that takes any number of them."""
        return _MOST_TOKENS if self.context is None else self.context


@dataclass(frozen=True)
class ImageFacts:
    """An image classifier's shapes. `image_size` is the side in pixels that it was trained with; `fixed_size`: it takes
    no other. `alpha` is its width multiplier as text, None for the full width."""

    family: str
    channels: int
    image_size: int
    classes: int
    fixed_size: bool
    alpha: str | None = None


@dataclass(frozen=True)
class Footprint:
    """A decoder with its stack applied, for the roofline. `streamed_bytes` are the weights that every step reads
    wholly, as they are stored. `row_bytes` is what one token reads of the tables that are only looked up.
    `product_dtypes` are what layers multiply that compute in another dtype than the model's."""

    facts: ModelFacts
    streamed_bytes: int
    row_bytes: int
    product_dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImageFootprint:
    """An image classifier with its stack applied, for the roofline. `streamed_bytes` are the weights, as they are
    stored. `flops` are the architecture's operations of products and convolutions for one image of `pixels` numbers.
    `product_dtypes` are what layers multiply that compute in another dtype than the model's."""

    facts: ImageFacts
    streamed_bytes: int
    flops: int
    pixels: int
    product_dtypes: tuple[str, ...] = ()


NOT_RECORDED = "The measuring process did not record it."
NO_MODEL = "The workload runs no model."
EXPLAINED = ("dtype", "attention_kernels", "threads", "weights", "footprint")
"""Fields of RunFacts whose null always has a reason."""


class WeightFacts(Frozen):
    """Which weights were measured. A null `hash` or `revision` has its reason in `reasons`, by the field's name."""

    bytes: int | None = None  # with the stack applied; what several layers share counts once
    parameters: int | None = None  # number of weights before the stack changed them
    # Share of these that the stack's technique of weights quantized, or that a file holds in 8 bits and fewer; a table
    # counts where its product is quantized. Null: nothing is quantized, or the engine does not say.
    quantized: float | None = None
    trainable: int | None = None  # weights that training changes; null: the workload trains nothing
    hash: str | None = None  # SHA-256 of the weights' files, or of the recipe that drew random ones
    hash_of: Literal["files", "recipe"] | None = None  # which of the two `hash` is
    files: dict[str, str] = Field(default_factory=dict)  # SHA-256 of each by its name; empty: random weights
    unused: str | None = None  # tensors of the files that the model has no place for, by their names
    revision: str | None = None  # a hub's commit, or the digest of a preset's architecture
    reasons: dict[str, str] = Field(default_factory=dict)


FROM_FILE = "file"
"""The family of a network that came from a file."""


class NetworkFacts(Frozen):
    """Which network an image classifier is, whatever its weights are."""

    family: str  # transformers' model_type, or the family of a manifest; FROM_FILE: not known
    alpha: str | None = None  # the width multiplier as it was written ("0.35"); null: the full width
    input: tuple[int, ...]  # [height, width, channels] of an image
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

    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)  # 95%, by metric
    without_part: dict[str, tuple[float, ...]] = Field(default_factory=dict)  # without each part in turn
    no_interval: dict[str, str] = Field(default_factory=dict)  # why a figure has no interval


class ToldFacts(Frozen):
    """How a server told its predictions, and the bounds of the divergence that follow (`optigpu/quality/told.py`)."""

    asked_in: str  # the interface that has the log-probabilities
    tokens: int  # that were asked for at each position
    rest: float  # mean probability that the reference gives to tokens that were not told; they are one bucket
    kld_low: float  # bound of kld_mean from below, in nats: the server's float32 is allowed for, nothing else assumed
    kld_high: float  # from above: kld_mean itself, where it was compared with fp32
    top1_agreement: float
    assumed: float  # the most by which log-probabilities are taken to be below the reference's on average in the rest
    left_out: int  # positions whose most likely token the server does not identify
    untold_targets: int  # tokens of the text whose own log-probability was not told
    vocabulary: str  # whether its tokens are those of the job's model
    reference: str | None = None  # the server that was compared with; null: the fp32 model


class TextQuality(QualityFacts):
    """On what text quality was measured, and how precisely."""

    text: str  # the text's name as `measure.quality.text` has it
    dataset: str | None  # where it was read; null for a text that the fp32 model wrote itself
    dataset_sha256: str | None
    tokens_sha256: str  # SHA-256 of the tokens: figures of two results compare only where it is equal
    positions: int  # predicted tokens
    asked_positions: int | None = (
        None  # that were to be predicted; more than `positions` where time was short
    )
    kld_positions: int  # the first of them, whose whole distributions were compared with fp32's
    passes_checked: int | None = (
        None  # positions at which whole passes predicted what the timed step does, before they
    )
    # predicted all; null: the timed step predicted all
    window: int  # in tokens
    stride: int | None  # how far windows begin apart; null where they do not overlap
    batch_size: int
    contexts_cut: int  # contexts that lost their beginning to fit the window
    kld_standard_error: float | None = None  # of kld_mean over positions; null for a single one
    fp32_perplexity: float | None = None  # the fp32 model's own; null: the text has none
    fp32_accuracy: float | None = None  # the fp32 model's own; null: the text is no test
    accuracy_standard_error: float | None = None
    items: int | None = None  # items of a multiple-choice test
    told: ToldFacts | None = (
        None  # of a server that tells log-probabilities of some tokens; null: all logits are known
    )


class ImageQuality(QualityFacts):
    """On what images quality was measured, and how precisely."""

    images: int
    of: str  # how they were made, or which folder they are from
    dataset_sha256: str | None = None  # of a folder of labelled images; null: images were made
    fp32_accuracy: float | None = None  # the fp32 model's own; null: images have no labels
    accuracy_standard_error: float | None = None
    kld_standard_error: float | None = None  # standard error of kld_mean over images; null for a single image


class PictureFacts(Frozen):
    """The folder of labelled images that was classified."""

    folder: str  # its name under the datasets folder
    sha256: str  # of the names, labels and contents of its files
    images: int
    labels: str  # how they were matched with the model's classes
    preprocessing: str  # how pixels became inputs


class LossQuality(QualityFacts):
    """How the losses of training compare with fp32's from the same weights, over the samples of its first seed."""

    losses: tuple[float, ...]  # of each step; those of the variant end before one that is not finite
    fp32_losses: tuple[float, ...]
    seeds: int  # how many fp32 was trained with
    band: float  # how far another seed would be, in nats: window means
    jitter_band: float  # single steps
    fall: float  # by how much fp32's loss fell from the first window to the last, in nats
    course: float | None = None  # distance from fp32's curve as a share of what is allowed; null: not finite
    jitter: float | None = None
    not_finite_step: int | None = None  # the first step, from 1, whose loss is not finite; null: all are


class AnswerPart(Frozen):
    """One tensor of an answer."""

    dtype: str
    shape: tuple[int, ...]


class Answers(Frozen):
    """What a function returned for each of its `calls`, whose bytes lie in a file one call after the other: `parts`,
    and `inputs` as they were afterwards, where they were asked for. `seconds` are those of the calls by the process's
    own clock."""

    calls: int
    parts: tuple[AnswerPart, ...]
    inputs: tuple[AnswerPart, ...] = ()
    seconds: float


class KernelFacts(Frozen):
    """How the answers of a brought function were held against the reference's, which another process computed on the
    same fresh inputs."""

    inputs: str  # their shapes and values ("2048x4096,4096")
    dtype: str
    answers: int = 0  # how many were compared
    error: float = 0.0  # the largest of any element, as a share of its size and the tensor's root mean square
    tolerance: float  # the most that is allowed
    # Seconds of a call by the conductor's clock, without `reading_s`; null: it was not timed so.
    outside_s: float | None = None
    reading_s: float | None = (
        None  # what reading an answer takes, by what the reference took beside its calls
    )


class TrainingFacts(Frozen):
    """What a step of training computes."""

    model_flops: float  # of products and convolutions: those that the model needs
    hardware_flops: float  # all that were executed


class HostPeak(Frozen):
    """How the host's peak memory was read."""

    scope: str  # what the peak contains
    source: str  # the kernel's high-water mark, or samples and why
    sampled_bytes: int  # the largest resident set among the samples
    samples: int


class EnergyFacts(Frozen):
    """How energy was read."""

    source: str  # the sensor
    scope: str  # which parts of the machine it counts
    resolution_j: float | None  # the sensor's smallest step; null where power is integrated
    looks: int  # how often the sensor was read while requests ran
    changes: int  # how often it had changed
    update_period_s: float | None = None  # the median from one change to the next; no less than between looks
    window_s: float  # how long requests ran
    requests: int
    idle_w: float  # power at rest
    idle_s: float  # how long it was read


class MeterFacts(Frozen):
    """How the meters read their figures."""

    quality: TextQuality | ImageQuality | LossQuality | None = None  # null where it was not measured
    host_peak: HostPeak | None = None  # null where memory was not measured
    energy: EnergyFacts | None = None  # null where energy was not measured
    recorded: dict[str, JsonValue] = Field(default_factory=dict)  # for people; no code reads it

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

    package: str  # that brought it
    library: str
    instructions: dict[str, int] | None = None  # of each set ("avx512", "vnni"); null: `reason` says why
    cuda: tuple[str, ...] = ()  # the GPUs' architectures that it has code for ("sm_90", "compute_90")
    lacks: tuple[str, ...] = ()  # what this machine has, a right build uses, and this library lacks
    build: str | None = None  # the command that builds it right; null where it lacks nothing
    reason: str | None = None


class WarmUpFacts(Frozen):
    """How one process warmed up: requests before the first timed one, and whether the last of them agreed."""

    requests: int
    steady: bool


class RunFacts(MeterFacts):
    """How a variant ran: what its first process, its meters and the conductor recorded. What a backend does not know is
    null, and `reasons` says why by the field's name; a null that means "none is used" needs no reason."""

    dtype: str | None = None  # the weights' as they were loaded ("float32"), before the stack replaced layers
    autocast: str | None = None  # the dtype that autocast computes in; null: no autocast
    autograd: str | None = None  # torch's mode: "no_grad", "inference" or "grad"; null: no autograd
    cudnn_tf32: bool | None = None  # cuDNN convolves float32 in TF32; null: no convolution, or no GPU
    float32_matmul_precision: str | None = None  # as a technique set it ("high": TF32); null: "highest"

    kv_cache: str | None = (
        None  # "dynamic", "static", "none", or what an engine calls it; null: no use for one
    )
    kv_cache_dtype: str | None = None  # of keys and values; null: the one that is computed with
    kv_cache_bytes_per_token: int | None = None  # of all layers; null: it follows from the shapes
    kv_cache_tokens: int | None = None  # the most of a sequence that the cache keeps; null: all
    kv_cache_sinks: int | None = None  # how many of them are its first

    attn_implementation: str | None = None  # transformers' ("sdpa", "eager"); null: the model has none
    attention_kernels: tuple[str, ...] | None = None  # that ran, by the profiler's names
    product_dtypes: tuple[str, ...] | None = None  # what torch multiplied in one request; null: not observed
    # Whether the GPU ran kernels in that request, and at least half of torch's matrix products; null: not observed.
    device_kernels: bool | None = None

    decode_loop: str | None = None  # whose decode loop ran; null: the workload decodes nothing
    decode_operator: str | None = None  # it replaced the model's decode step; null: none did
    tokens_per_pass: float | None = None  # the mean of tokens that one pass gave; null: always one

    threads: int | None = None  # CPU threads of the measuring process
    nice: int | None = None  # the nice value of timed requests: -20 is the highest priority, 0 the usual one
    reach: Literal["network", "loopback"] | None = None  # "loopback": of its own alone; null: unknown
    versions: dict[str, str] = Field(default_factory=dict)  # of the engine's libraries
    builds: tuple[BuildFacts, ...] = ()  # of the libraries that computed; empty: not known

    prompt_tokens: int | None = None  # of a text prompt; null: prompts are random, as the workload says
    scenario: ScenarioName | None = None  # MLPerf's scenario, or that of a load; null: the workload has none
    load: LoadFacts | None = None  # how requests arrived and what the queue did; null: no load
    image_shape: tuple[int, int, int] | None = None  # [channels, height, width]; null: no images
    pictures: PictureFacts | None = None  # the folder whose images were classified; null: images are random
    kernel: KernelFacts | None = None  # how a brought function was checked; null: none was brought
    network: NetworkFacts | None = None  # that classified images; null: the workload classifies none

    weights: WeightFacts | None = None  # which weights were measured
    footprint: Footprint | ImageFootprint | None = None  # what a step reads of the model
    training: TrainingFacts | None = None  # null: nothing is trained, or its engine cannot count it
    training_dtypes: tuple[str, ...] = ()  # what layers multiply that train in another dtype than the model's

    warmup: tuple[WarmUpFacts, ...] = ()  # how each process warmed up, in the order of the replicates
    side_by_side: tuple[int, ...] = ()  # variants whose processes were resident together, its own included
    # Times within requests (of each token) by name: count, quantiles and extremes in seconds. They only describe.
    described: dict[str, dict[str, float]] = Field(default_factory=dict)
    roofline: RooflineFacts | None = None  # how far it is from what the machine can do; null until judged

    reasons: dict[str, str] = Field(default_factory=dict)  # why a field is null, by the field's name

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
