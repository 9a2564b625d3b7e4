"""Predicts the peak of a device's memory while a decoder generates: weights, key-value cache, activations. Nothing is
loaded. Weights are counted by `optigpu.models.described` and the techniques' hook `stored`, the cache by the shapes of
the model, and activations by what transformers' forward passes hold at their widest points: in the MLP of the last
block, in its attention, at the head, and while a cache grows. docs/choose.md has the errors against measured peaks.

And what training needs with each of several stacks, by the needs of a step that were predicted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from optigpu.backends.torch import cache_options, load_options, mode_options
from optigpu.backends.training import TrainingNeed
from optigpu.hardware.catalog import Device
from optigpu.hardware.cpu import has_onednn_bfloat16, sums_bfloat16_apart
from optigpu.job.spec import Variant
from optigpu.models.described import DecoderShape, LayerCache, OwnPasses, Part, StoredWeights, decoder_shape
from optigpu.models.reference import parse_reference
from optigpu.ops.layouts import KV_SCALE_BYTES
from optigpu.techniques.base import ON_TEXT, CacheOptions, LoadOptions, Technique, engine_options
from optigpu.vocabulary import DeviceKind, Frozen, SpecError, UnsupportedError
from optigpu.workloads.train_step import TrainStep

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in the dtypes that models are loaded in."""
FLOAT, INDEX = 4, 8
LLAMA_CPP_TOKENS = 512
"""Tokens of a prompt that llama.cpp computes at once (n_ubatch)."""


@dataclass(frozen=True)
class Load:
    """What is generated at once: `batch` sequences, each of `prompt` tokens and `new` ones."""

    batch: int
    prompt: int
    new: int

    @property
    def context(self) -> int:
        return self.prompt + self.new


@dataclass(frozen=True)
class MemoryNeed:
    """Predicted bytes on the device at the peak; `activations` is all that is neither weights nor cache."""

    weights: int
    cache: int
    activations: int

    @property
    def peak(self) -> int:
        return self.weights + self.cache + self.activations


class DecoderMemory:
    """The memory of one decoder with one stack on one kind of device, for any load."""

    def __init__(
        self,
        shape: DecoderShape,
        stack: tuple[Technique, ...],
        device: DeviceKind,
        backend: str = "torch",
    ) -> None:
        """`stack` is resolved. Raises UnsupportedError for a technique whose bytes depend on more than shapes.
        llama.cpp computes prompts in parts of LLAMA_CPP_TOKENS and allocates its cache as a whole, of float16 where
        weights are quantized."""
        self.shape, self.stack, self.device = shape, stack, device
        self.options: LoadOptions = load_options(stack)
        self.cache: CacheOptions = cache_options(stack)
        width = WIDTHS[self.options.dtype]
        stored: StoredWeights = shape.stored(width, half=self.options.dtype == "bfloat16")
        for technique in stack:
            stored = technique.stored(stored, device)
        self.stored = stored
        autocast = mode_options(stack).autocast
        self.width = WIDTHS[autocast] if autocast else width
        self.at_once: int | None = None
        if backend == "llama_cpp":
            self.cache = CacheOptions(kind="static")
            self.at_once = LLAMA_CPP_TOKENS
        self.cache_width = 2 if engine_options(stack).weights != "float32" else self.width

    def need(self, load: Load) -> MemoryNeed:
        """The peak, at the worse of the prompt's pass and the last decode step."""
        if self.stored.own_passes is not None:
            return self._own_need(load, self.stored.own_passes)
        prompt = load.prompt if self.at_once is None else min(load.prompt, self.at_once)
        length = load.context - 1  # the last token is decoded and not cached any more
        step = length if self.cache.kind == "none" else 1
        points = (self._pass(load, prompt, load.prompt), self._pass(load, step, length))
        cache, activations = max(points, key=sum)
        return MemoryNeed(self.stored.bytes, cache, activations + self.stored.widened_bytes)

    def _own_need(self, load: Load, own: OwnPasses) -> MemoryNeed:
        """The cache and the angles of all positions; then the prompt's logits beside those of the decode steps."""
        room = -(-load.context // own.at_once) * own.at_once
        rows = min(load.batch * load.prompt, own.most_rows)
        passes = rows * own.row_bytes + 2 * load.batch * self.shape.facts.vocabulary * FLOAT
        ids = 2 * INDEX * load.batch * load.new
        angles = max(own.made_angle_bytes * room, own.angle_bytes * room + passes + ids)
        cache = load.batch * room * own.token_bytes
        return MemoryNeed(self.stored.bytes, cache, angles + self.stored.widened_bytes)

    def cache_bytes(self, batch: int, tokens: int, room: int) -> int:
        """Of keys and values of `tokens` tokens; a static cache has room for `room` of them."""
        return sum(layer.count * self._of_a_layer(layer, batch, tokens, room) for layer in self.shape.caches)

    def _of_a_layer(self, layer: LayerCache, batch: int, tokens: int, room: int) -> int:
        options = self.cache
        if options.kind == "none":
            return 0
        kept = room if options.kind == "static" else tokens
        if options.window is not None:
            kept = min(kept, options.sinks + options.window)
        if layer.window is not None and options.kind != "static":
            kept = min(kept, layer.window - 1)
        if options.int8:
            return batch * kept * layer.kv_heads * (layer.key_size + layer.value_size + 2 * KV_SCALE_BYTES)
        # Under autocast rotated keys come out in the weights' dtype and values in the narrower one.
        is_mixed = self.width < self.stored.width and self.shape.passes.rotary
        key_width, value_width = self.stored.width if is_mixed else self.cache_width, self.cache_width
        return batch * kept * layer.kv_heads * (layer.key_size * key_width + layer.value_size * value_width)

    def _pass(self, load: Load, tokens: int, length: int) -> tuple[int, int]:
        cache = self.cache_bytes(load.batch, length, load.context)
        layer = max(self._of_a_layer(each, load.batch, length, load.context) for each in self.shape.caches)
        return cache, max(self._points(load.batch, tokens, length, layer))

    def _points(self, batch: int, tokens: int, length: int, layer: int) -> Iterator[int]:
        """Bytes of activations at the widest points of a pass of `tokens` tokens that attend to `length`. `layer` is
        the largest cache of one."""
        facts, width = self.shape.facts, self.width
        hidden = batch * tokens * facts.hidden_size * self.stored.width
        positions = 2 if self.shape.learns_positions else 0
        rotary = 2 * batch * tokens * facts.head_size * self.stored.width if self.shape.passes.rotary else 0
        inner = batch * tokens * self.shape.inner_size * width
        ids = 2 * INDEX * batch * length
        around = (4 + positions) * hidden + rotary + ids
        stored, computed = self._scores(batch, tokens, length)
        yield around + self.shape.passes.inner_tensors * inner + stored
        if self.stored.sum_bytes:
            sums = inner // width * self.stored.sum_bytes
            yield around + (inner if facts.gated_mlp else 0) + sums + stored
        if self.device is DeviceKind.CPU and self.stored.width == 2 and sums_bfloat16_apart():
            yield around + (2 if facts.gated_mlp else 1) * inner + FLOAT * (inner // width) + stored
        if computed:
            yield around - hidden + batch * tokens * facts.heads * facts.head_size * width + computed
        else:
            yield around + self._attention(batch, tokens, length, layer)
        yield 2 * hidden + batch * facts.vocabulary * (width + FLOAT) + ids + self._beside_the_head()

    def _beside_the_head(self) -> int:
        """Of a plain head: what is copied for its product, without what a layer widened for its own, which is gone."""
        head = next(matrix for matrix in self.stored.matrices if matrix.part is Part.HEAD)
        as_loaded = self.stored.width * head.elements
        if head.bytes not in (0, as_loaded):
            return 0
        # oneDNN copies 16-bit numbers into its own layout; where it has no such products torch's own copy nothing.
        is_copied = self.device is DeviceKind.CPU and self.stored.width == 2 and has_onednn_bfloat16()
        gone = (
            self.stored.widened_bytes if self.width == self.stored.width else 0
        )  # autocast keeps its copies
        return (as_loaded if is_copied else 0) - gone

    def _scores(self, batch: int, tokens: int, length: int) -> tuple[int, int]:
        """Bytes of what eager attention stores: after it, its weights with the mask; within it, scores in float32, and
        keys and values that are repeated for each of the heads that share them."""
        if self.options.attention != "eager":
            return 0, 0
        facts = self.shape.facts
        each, mask = batch * facts.heads * tokens * length, batch * tokens * length * self.width
        repeated = 0
        if facts.kv_heads != facts.heads:
            repeated = 2 * batch * length * facts.heads * facts.head_size * self.width
        within = 2 * self.width
        if self.shape.passes.float_scores and self.width < FLOAT:
            # A CPU widens scores before their softmax, a GPU within it.
            within = self.width + (2 * FLOAT if self.device is DeviceKind.CPU else FLOAT)
        return each * self.width + mask, each * within + mask + repeated

    def _attention(self, batch: int, tokens: int, length: int, layer: int) -> int:
        """Queries, keys and values with their rotated copies, and copies of one layer's cache: a dynamic one is joined
        from a copy of its keys or values, one of our own from both, and int8 ones are widened."""
        facts, width, options = self.shape.facts, self.width, self.cache
        queries = batch * tokens * facts.heads * facts.head_size * width
        keys = batch * tokens * facts.kv_heads * facts.head_size * width
        joined = 0
        is_own = options.int8 or options.window is not None
        if options.kind == "dynamic":
            joined = layer if is_own else layer // 2
        copies = 3 if self.device is DeviceKind.CPU else 2
        widened = copies * batch * length * facts.kv_heads * facts.head_size * width if options.int8 else 0
        return 2 * queries + 2 * keys + joined + widened


def predicted_weight_bytes(variant: Variant) -> int | None:
    """The bytes of a variant's weights; None where they cannot be predicted, or it has no decoder."""
    if variant.model is None or variant.workload.task not in ON_TEXT:
        return None
    try:
        shape = decoder_shape(parse_reference(variant.model))
        return DecoderMemory(shape, variant.stack, variant.device, variant.backend).stored.bytes
    except UnsupportedError:
        return None


TIMES = 4
"""How many times larger the second batch is, from which the bytes of a sample follow."""
USUAL: tuple[tuple[str, ...], ...] = (
    (),
    ("mixed_precision",),
    ("gradient_checkpointing",),
    ("mixed_precision", "gradient_checkpointing"),
    ("mixed_precision", "gradient_checkpointing", "optimizer_in_backward"),
)


class StackNeeds(Frozen):
    """What a step needs with one stack, for each of several batches, or the reason why that cannot be predicted."""

    needs: tuple[TrainingNeed, ...] = ()
    reason: str | None = None


class TrainingFit(Frozen):
    """What one stack needs for a step, predicted. `state_bytes` are the optimizer's states, `step_bytes` gradients and
    activations at the peak. `largest_batch` is 0 where not even one sample fits."""

    label: str
    weight_bytes: int | None = None
    state_bytes: int | None = None
    step_bytes: int | None = None
    peak_bytes: int | None = None
    fits: bool = False
    largest_batch: int | None = None
    reason: str | None = None


class FitOfTraining(Frozen):
    """The stacks of a model on a card; `sequence_tokens` are those of a row."""

    basis: Literal["predicted"] = "predicted"
    model: str
    gpu: str
    memory_bytes: int
    usable_bytes: int
    batch: int
    sequence_tokens: int
    stacks: tuple[TrainingFit, ...]


@dataclass(frozen=True)
class TrainingAsked:
    """Whether steps of `batch` rows fit a card, of which `reserve_bytes` are kept free. Raises SpecError where these
    leave nothing."""

    model: str
    card: Device
    batch: int
    sequence_tokens: int
    reserve_bytes: int

    def __post_init__(self) -> None:
        if self.usable_bytes <= 0:
            raise SpecError(
                f"reserve: {self.reserve_bytes} bytes leave nothing of {self.card.name}; reserve less."
            )

    @property
    def usable_bytes(self) -> int:
        return (self.card.memory_bytes or 0) - self.reserve_bytes

    @property
    def workloads(self) -> tuple[TrainStep, ...]:
        """The steps whose needs tell it: of one row, of several, and of those that are asked for."""
        sizes = (1, 1 + TIMES, self.batch)
        return tuple(TrainStep(batch_size=size, sequence_tokens=self.sequence_tokens) for size in sizes)


def fit_of(
    asked: TrainingAsked, stacks: Sequence[tuple[Technique, ...]], needs: Sequence[StackNeeds]
) -> FitOfTraining:
    pairs = zip(stacks, needs, strict=True)
    return FitOfTraining(
        model=asked.model,
        gpu=asked.card.name,
        memory_bytes=asked.card.memory_bytes or 0,
        usable_bytes=asked.usable_bytes,
        batch=asked.batch,
        sequence_tokens=asked.sequence_tokens,
        stacks=tuple(_row(stack, found, asked.usable_bytes) for stack, found in pairs),
    )


def _row(stack: tuple[Technique, ...], found: StackNeeds, usable: int) -> TrainingFit:
    label = " + ".join(technique.name for technique in stack) or "fp32"
    if found.reason is not None:
        return TrainingFit(label=label, reason=found.reason)
    one, several, needed = found.needs
    # Beyond what a step needs in any case, a sample adds the same each time.
    slope = max(1, (several.peak_bytes - one.peak_bytes) // TIMES)
    largest = 1 + TIMES + (usable - several.peak_bytes) // slope
    return TrainingFit(
        label=label,
        weight_bytes=needed.weight_bytes,
        state_bytes=needed.held_bytes - needed.weight_bytes,
        step_bytes=needed.peak_bytes - needed.held_bytes,
        peak_bytes=needed.peak_bytes,
        fits=needed.peak_bytes <= usable,
        largest_batch=max(0, largest) if one.peak_bytes <= usable else 0,
    )
