"""Predicts the peak of a device's memory while a decoder generates: weights, key-value cache, activations.

Nothing is loaded. Weights are counted by `optigpu.models.tensors` and the techniques' hook `stored`, the cache by the
shapes of the model, and activations by what transformers' forward passes hold at their widest points: in the MLP of the
last block, in its attention, at the head, and while a cache grows. docs/fit.md has the errors against measured peaks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from optigpu.backends.torch.stack import cache_options, load_options, mode_options
from optigpu.models.tensors import DecoderShape, StoredWeights
from optigpu.ops.layouts import KV_SCALE_BYTES
from optigpu.techniques.base import CacheOptions, LoadOptions, Technique
from optigpu.vocabulary import DeviceKind

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in the dtypes that models are loaded in."""
FLOAT, INDEX = 4, 8


@dataclass(frozen=True)
class Load:
    """What is generated at once: `batch` sequences, each of `prompt` tokens and `new` ones."""

    batch: int
    prompt: int
    new: int

    @property
    def context(self) -> int:
        """Tokens of a sequence in the end."""
        return self.prompt + self.new


@dataclass(frozen=True)
class MemoryNeed:
    """Predicted bytes on the device at the peak; `activations` is all that is neither weights nor cache."""

    weights: int
    cache: int
    activations: int

    @property
    def peak(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.activations


class DecoderMemory:
    """The memory of one decoder with one stack on one kind of device, for any load."""

    def __init__(self, shape: DecoderShape, stack: tuple[Technique, ...], device: DeviceKind) -> None:
        """`stack` is resolved. Raises UnsupportedError for a technique whose bytes depend on more than shapes."""
        self.shape, self.stack = shape, stack
        self.options: LoadOptions = load_options(stack)
        self.cache: CacheOptions = cache_options(stack)
        width = WIDTHS[self.options.dtype]
        stored: StoredWeights = shape.stored(width, half=self.options.dtype == "bfloat16")
        for technique in stack:
            stored = technique.stored(stored, device)
        self.stored = stored
        autocast = mode_options(stack).autocast
        self.width = WIDTHS[autocast] if autocast else width

    def need(self, load: Load) -> MemoryNeed:
        """The peak, at the worse of the prompt's pass and the last decode step."""
        points = (self._prompt(load), self._last_step(load))
        cache, activations = max(points, key=sum)
        return MemoryNeed(self.stored.bytes, cache, activations + self.stored.widened_bytes)

    def cache_bytes(self, batch: int, tokens: int, room: int) -> int:
        """Of keys and values of `tokens` tokens; a static cache has room for `room` of them."""
        options = self.cache
        if options.kind == "none":
            return 0
        kept = room if options.kind == "static" else tokens
        if options.window is not None:
            kept = min(kept, options.sinks + options.window)
        if self.shape.window is not None:
            last = self.shape.window if options.kind == "static" else self.shape.window - 1
            kept = min(kept, last)
        facts = self.shape.facts
        row = facts.head_size + KV_SCALE_BYTES if options.int8 else facts.head_size * self.width
        return 2 * batch * kept * facts.layers * facts.kv_heads * row

    def _prompt(self, load: Load) -> tuple[int, int]:
        cache = self.cache_bytes(load.batch, load.prompt, load.context)
        return cache, max(self._points(load.batch, load.prompt, load.prompt, cache))

    def _last_step(self, load: Load) -> tuple[int, int]:
        """The last token is decoded and not cached any more."""
        length = load.context - 1
        cache = self.cache_bytes(load.batch, length, load.context)
        tokens = length if self.cache.kind == "none" else 1
        return cache, max(self._points(load.batch, tokens, length, cache))

    def _points(self, batch: int, tokens: int, length: int, cache: int) -> Iterator[int]:
        """Bytes of activations at the widest points of a pass of `tokens` tokens that attend to `length`."""
        facts, width = self.shape.facts, self.width
        hidden = batch * tokens * facts.hidden_size * width
        positions = 2 if self.shape.family.learns_positions else 0
        rotary = 2 * batch * tokens * facts.head_size * width if self.shape.small.rotary else 0
        inner = batch * tokens * (facts.inner_size or 4 * facts.hidden_size) * width
        ids = 2 * INDEX * batch * length
        yield (4 + positions) * hidden + rotary + self.shape.small.inner_tensors * inner + ids
        yield (4 + positions) * hidden + rotary + self._attention(batch, tokens, length, cache) + ids
        yield 2 * hidden + batch * facts.vocabulary * (width + FLOAT) + ids

    def _attention(self, batch: int, tokens: int, length: int, cache: int) -> int:
        """Queries, keys and values with their rotated copies; scores where attention stores them; a cache that grows
        is joined from a copy of one layer's keys or values."""
        facts, width = self.shape.facts, self.width
        queries = batch * tokens * facts.heads * facts.head_size * width
        keys = batch * tokens * facts.kv_heads * facts.head_size * width
        joined = cache // (2 * facts.layers) if self.cache.kind == "dynamic" else 0
        widened = 2 * batch * length * facts.kv_heads * facts.head_size * width if self.cache.int8 else 0
        scores = 0
        if self.options.attention == "eager":
            scores = batch * facts.heads * tokens * length * (2 * width + FLOAT)
        return 2 * queries + 2 * keys + joined + widened + scores
