"""The key-value caches of the techniques, as transformers caches."""

from inspect import signature
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from optigpu.backends.torch.int8_cache import int8_token_bytes
from optigpu.backends.torch.kv_layers import FixedLayer, GrowingLayer
from optigpu.documents.shapes import ModelFacts
from optigpu.models.loading.packed_checkpoints import count_packed
from optigpu.surgery.sameness import LONGEST, decoded, require_same, windows_of
from optigpu.techniques.base import CacheOptions
from optigpu.vocabulary import UnsupportedError


def new_cache(model: PreTrainedModel, options: CacheOptions, length: int) -> Cache:
    """An empty transformers cache; a static one has room for `length` tokens.

    The library's own, unless its layers cannot hold what is asked for: then those are exchanged for ours.
    """
    cache: Cache
    if options.kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=length)
        if _is_own(options) or options.mixed:
            cache.layers = [_exchanged(layer, FixedLayer(options, length)) for layer in cache.layers]
        return cache
    cache = DynamicCache(config=model.config)
    if _is_own(options):
        cache.layers = [GrowingLayer(options) for _ in cache.layers]
    return cache


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's `forward` calls the cache: those without attention have a name of their own.

    Raises UnsupportedError for one that takes no cache.
    """
    taken = signature(model.forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in taken:
            return name
    raise UnsupportedError(
        f"{model.config.model_type} models take no cache of transformers, so that no step can be asked for its "
        "logits; leave quality and the techniques for steps and caches out."
    )


def require_cacheable(model: PreTrainedModel, options: CacheOptions) -> None:
    """Raises UnsupportedError for a model that computes something else with such a cache.

    A static cache must give what the growing one gives; a cache of ours needs layers that all keep the keys and values
    of the whole sequence.
    """
    if options.kind == "static":
        _require_static(model)
    if not _is_own(options):
        return
    others = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {
        DynamicLayer.__name__
    }
    if others:
        raise UnsupportedError(
            f"int8_kv_cache and sliding_kv_cache need layers that attend to the whole sequence; this model also has "
            f"{', '.join(sorted(others))}. Leave them out of the stack."
        )


def cache_facts(options: CacheOptions, model: ModelFacts) -> dict[str, Any]:
    """The cache's facts for the result; the bytes of a token are those of one sequence, over all layers."""
    facts: dict[str, Any] = {"kv_cache": options.kind}
    if options.int8:
        token_bytes = int8_token_bytes(model.layers, model.kv_heads, model.head_size)
        facts |= {"kv_cache_dtype": "int8", "kv_cache_bytes_per_token": token_bytes}
    if options.window is not None:
        facts |= {"kv_cache_tokens": options.sinks + options.window, "kv_cache_sinks": options.sinks}
    return facts


def _require_static(model: PreTrainedModel) -> None:
    """Asks the model itself: transformers' mark says whether a step can be one graph, and little of position biases."""
    family = model.config.model_type
    if not (model._can_compile_fullgraph or _is_told_by_a_text(model)):
        raise UnsupportedError(
            f"transformers marks {family} models as unfit for a static cache; leave out static_kv_cache and what needs "
            "it."
        )
    if count_packed(model):  # its layers compute once a technique has put its own in their place
        return
    try:
        found = decoded(model, lambda tokens: StaticCache(config=model.config, max_cache_len=2 * tokens))
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise UnsupportedError(
            f"This {family} model does not run with a static cache ({why}); leave out static_kv_cache and what needs "
            "it."
        ) from error
    wanted = decoded(model, lambda _: DynamicCache(config=model.config))
    require_same("static_kv_cache", model, wanted, found)


def _is_told_by_a_text(model: PreTrainedModel) -> bool:
    """Whether a short text shows all that a cache may change: the model takes one, and no window is longer."""
    taken = signature(model.forward).parameters
    return "past_key_values" in taken and all(window <= LONGEST for window in windows_of(model))


def _is_own(options: CacheOptions) -> bool:
    """Whether a stack needs layers that the library does not have."""
    return options.int8 or options.window is not None


def _exchanged(layer: Any, own: FixedLayer) -> Any:
    """Replaces the library's layers for full attention by ours; other layers stay as they are."""
    return own if type(layer) is StaticLayer else layer
