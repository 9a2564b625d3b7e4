"""The key-value caches of the techniques, as transformers caches with layers of our own.

What a layer stores may be int8, and may be a window of the sequence; what is attended is what is stored. Of a window
(Xiao et al., StreamingLLM, 2023, arXiv:2309.17453) the first `sinks` tokens and the last `window` ones are kept, the
current one among them. Tokens that come together, a prompt, attend to each other wholly and causally, and to what was
kept before them; what falls out of the window is dropped after them. Positions stay those of the sequence.

`int8_kv_cache` has one scale for each token and head: those for each channel (Liu et al., KIVI, 2024, arXiv:2402.02750)
suit keys better below 8 bits alone, and need groups of tokens that are held back until they are full.
"""

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from optigpu.documents.facts import ModelFacts
from optigpu.models.loading.checkpoint import count_packed
from optigpu.ops.layouts import KV_SCALE_BYTES
from optigpu.ops.operands import INT8_LARGEST
from optigpu.surgery.sameness import LONGEST, decoded, require_same, told, windows_of
from optigpu.techniques.base import CacheOptions
from optigpu.vocabulary import UnsupportedError

Parts = tuple[torch.Tensor, ...]
"""Keys and values, [batch, heads, tokens, head_size] each; int8 ones with their scales, [batch, heads, tokens, 1]."""


class GrowingLayer(DynamicLayer):
    """A layer that grows by concatenation, up to its window."""

    def __init__(self, options: CacheOptions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.options = options
        self.parts: Parts = ()
        self.cumulative_length = 0
        self.is_croppable = options.window is None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states, [batch, heads, tokens, head_size] each, and returns what they attend to."""
        new = _packed(key_states, value_states, self.options.int8)
        # Joined to nothing it is a copy: a view would keep the queries that it was made with.
        old = self.parts if self.is_initialized else _mapped(_none_of, new)
        joined = _mapped(lambda *parts: torch.cat(parts, dim=-2), old, new)
        kept = _mapped(functools.partial(_in_window, options=self.options), joined)
        self.cumulative_length += key_states.shape[-2]
        self._keep(kept)
        attended = kept if key_states.shape[-2] == 1 else joined
        return _unpacked(attended, key_states.dtype, value_states.dtype)

    def _keep(self, parts: Parts) -> None:
        self.parts, self.keys, self.values = parts, parts[0], parts[1]
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of attended tokens, and the offset at which the last of them is the last query's position."""
        kept = self.parts[0].shape[-2] if self.is_initialized else 0
        length = kept + query_length
        room = _room(self.options)
        if query_length == 1 and room is not None:
            length = min(length, room)
        return length, self.cumulative_length + query_length - length

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last tokens, as many as the negative number says. Raises UnsupportedError for a window."""
        if not self.is_croppable:
            raise UnsupportedError("A sliding cache cannot remove tokens; leave sliding_kv_cache out.")
        if tokens_to_remove < 0 and self.is_initialized:
            self._keep(_mapped(lambda part: part[:, :, :tokens_to_remove], self.parts))
            self.cumulative_length += tokens_to_remove


class WholeHybridLayer(LinearAttentionAndStaticFullAttentionLayer):
    """Convolutions, and attention over the whole sequence. Inkling reads the length before a step adds to it."""

    def get_seq_length(self) -> int:
        """Or an int64 tensor [] of its own, of which torch records what is made."""
        return cast(int, self.cumulative_length.clone()) if self.is_initialized else 0


class FixedLayer(StaticLayer):
    """A layer with room for `length` tokens that is allocated once; a window's is a ring behind the sinks."""

    def __init__(self, options: CacheOptions, length: int) -> None:
        super().__init__(max_cache_len=min(length, _room(options) or length))
        self.options = options
        self.parts: Parts = ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        empty = _packed(_none_of(key_states), _none_of(value_states), self.options.int8)
        room = self.max_cache_len
        self.parts = _mapped(lambda part: part.new_zeros((*part.shape[:2], room, part.shape[3])), empty)
        self.keys, self.values = self.parts[:2]
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            # A CUDA graph knows these addresses.
            for tensor in (*self.parts, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As GrowingLayer's. Raises UnsupportedError for a second prompt: a ring has no room for it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[-2]
        new = _packed(key_states, value_states, self.options.int8)
        together = tokens > 1 and self.options.window is not None
        if together and int(self.cumulative_length):
            raise UnsupportedError("A static sliding cache takes one prompt; leave static_kv_cache out.")
        positions = torch.arange(tokens, device=self.device) + self.cumulative_length
        # In place: a compiled graph knows its address.
        self.cumulative_length.add_(tokens)
        self._write(new, positions)
        return _unpacked(new if together else self.parts, key_states.dtype, value_states.dtype)

    def _write(self, new: Parts, positions: torch.Tensor) -> None:
        if positions.shape[0] > self.max_cache_len:
            new = _mapped(functools.partial(_in_window, options=self.options), new)
            positions = _in_window(positions[:, None], self.options)[:, 0]
        if self.options.window is not None:
            sinks = self.options.sinks  # at their own places, the others around a ring behind them
            around = sinks + (positions - sinks) % self.options.window
            positions = torch.where(positions < sinks, positions, around)
        for part, states in zip(self.parts, new, strict=True):
            part.index_copy_(2, positions, states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens attention is given, and the position of the first."""
        together = query_length > 1 and self.options.window is not None
        return (query_length if together else self.max_cache_len), 0


def _packed(keys: torch.Tensor, values: torch.Tensor, int8: bool) -> Parts:
    if not int8:
        return keys, values
    (q_keys, key_scales), (q_values, value_scales) = quantize_tokens(keys), quantize_tokens(values)
    return q_keys, q_values, key_scales, value_scales


def _unpacked(
    parts: Parts, key_dtype: torch.dtype, value_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values, *scales = parts
    if not scales:
        return keys, values
    return dequantize_tokens(keys, scales[0], key_dtype), dequantize_tokens(values, scales[1], value_dtype)


def _mapped(function: Callable[..., torch.Tensor], *parts: Parts) -> Parts:
    return tuple(function(*each) for each in zip(*parts, strict=True))


def _none_of(part: torch.Tensor) -> torch.Tensor:
    return part[:, :, :0]


def _room(options: CacheOptions) -> int | None:
    """Tokens that a window keeps; None without one."""
    return None if options.window is None else options.sinks + options.window


def _in_window(part: torch.Tensor, options: CacheOptions) -> torch.Tensor:
    """The tokens (the last dimension but one) that stay."""
    if options.window is None or part.shape[-2] <= options.sinks + options.window:
        return part
    return torch.cat([part[..., : options.sinks, :], part[..., part.shape[-2] - options.window :, :]], dim=-2)


def new_cache(model: PreTrainedModel, options: CacheOptions, length: int) -> Cache:
    """An empty transformers cache, with layers of ours if it needs them; a static one has room for `length` tokens.

    Layers with a window keep the whole sequence in a static one, and the mask hides what is out of it: transformers'
    own count their tokens by a Python number, which a recorded step would keep as it was.
    """
    cache: Cache
    if options.kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=length)
        is_ours = _is_own(options) or options.mixed
        for index, layer in enumerate(cache.layers):
            if type(layer) in (StaticLayer, StaticSlidingWindowLayer):
                cache.layers[index] = FixedLayer(options, length) if is_ours else StaticLayer(length)
            elif type(layer) is LinearAttentionAndStaticSlidingWindowAttentionLayer:
                states = layer.number_of_states
                cache.layers[index] = WholeHybridLayer(length, states)
        return cache
    cache = DynamicCache(config=model.config)
    if _is_own(options):
        cache.layers = [GrowingLayer(options) for _ in cache.layers]
    return cache


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's `forward` calls the cache. Raises UnsupportedError for one that takes no cache."""
    taken = signature(model.forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in taken:
            return name
    raise UnsupportedError(no_steps(model, "take no cache of transformers"))


def no_steps(model: PreTrainedModel, why: str) -> str:
    """Why no step of a model can be asked for its logits, as a sentence."""
    return (
        f"{model.config.model_type} models {why}, so that no step can be asked for its logits; add no_kv_cache, or "
        "leave quality and the techniques for steps and caches out."
    )


def require_cacheable(model: PreTrainedModel, options: CacheOptions) -> None:
    """Raises UnsupportedError for a model that computes otherwise with such a cache, or whose layers ours cannot
    hold."""
    if options.kind == "static":
        _require_static(model)
    if not _is_own(options):
        return
    cache_argument(model)
    if others := layers_beside_whole_attention(model):
        raise UnsupportedError(
            f"int8_kv_cache and sliding_kv_cache need layers that attend to the whole sequence; this model also has "
            f"{others}. Leave them out of the stack."
        )


def layers_beside_whole_attention(model: PreTrainedModel) -> str:
    """The kinds of layers of its cache that do not keep the keys and values of the whole sequence, or ""."""
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    return ", ".join(sorted(kinds - {DynamicLayer.__name__}))


def cache_facts(options: CacheOptions, model: ModelFacts) -> dict[str, Any]:
    """The cache's facts for the result; the bytes of a token are those of one sequence, over all layers."""
    facts: dict[str, Any] = {"kv_cache": options.kind}
    if options.int8:
        token_bytes = 2 * model.layers * model.kv_heads * (model.head_size + KV_SCALE_BYTES)
        facts |= {"kv_cache_dtype": "int8", "kv_cache_bytes_per_token": token_bytes}
    if options.window is not None:
        facts |= {"kv_cache_tokens": options.sinks + options.window, "kv_cache_sinks": options.sinks}
    return facts


def _require_static(model: PreTrainedModel) -> None:
    """Asks the model itself: transformers' mark says whether a step can be one graph, and little of position biases."""
    family = model.config.model_type
    takes_one = "past_key_values" in signature(model.forward).parameters
    # A short text shows all that a cache may change.
    is_told_by_a_text = takes_one and all(window <= LONGEST for window in windows_of(model))
    if not (model._can_compile_fullgraph or is_told_by_a_text):
        raise UnsupportedError(
            f"transformers marks {family} models as unfit for a static cache; leave out static_kv_cache and what needs "
            "it."
        )
    if count_packed(model):  # its layers compute once a technique has put its own in their place
        return

    def refusal(why: str) -> str:
        return (
            f"This {family} model does not run with a static cache ({why}); leave out static_kv_cache and what needs "
            "it."
        )

    with told(refusal):
        found = decoded(model, lambda tokens: new_cache(model, CacheOptions(kind="static"), 2 * tokens))
    wanted = decoded(model, lambda _: DynamicCache(config=model.config))
    require_same("static_kv_cache", model, wanted, found)


def _is_own(options: CacheOptions) -> bool:
    return options.int8 or options.window is not None


def quantize_tokens(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 numbers and their scales (absmax / 127, round to nearest).

    states: floating point [batch, heads, tokens, head_size]. Returns int8 of the same shape and float32
    [batch, heads, tokens, 1]; a state is wrong by at most half a scale. NaN and infinity stay visible in the scale.
    """
    wide = states.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / INT8_LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale).round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8), scale


def dequantize_tokens(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (q * scale).to(dtype)
