"""The key-value caches that a stack may ask for, as transformers caches."""

from typing import Any

from optigpu.techniques.base import CacheOptions


def new_cache(model: Any, options: CacheOptions, length: int) -> Any:
    """An empty transformers cache; a static one has room for `length` tokens."""
    from transformers import DynamicCache, StaticCache

    if options.kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    return DynamicCache(config=model.config)
