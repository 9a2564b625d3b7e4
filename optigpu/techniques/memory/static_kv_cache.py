from collections.abc import Mapping
from typing import ClassVar, Literal

from optigpu.techniques.base import CacheOptions, Expected, Phase, Technique
from optigpu.vocabulary import Layer


class StaticKvCache(Technique):
    """A cache of the request's full length instead of one that grows by concatenation."""

    layer = Layer.MEMORY
    phase = Phase.CACHE
    summary = "keys and values in buffers allocated once, so that shapes never change"
    citation = "gpt-fast, pytorch.org/blog/accelerating-generative-ai-2, 2023"
    expected = (Expected("aim", "little alone; it makes one compiled decode step possible"),)
    conflicts: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "one uses a key-value cache and the other disables it"
    }

    name: Literal["static_kv_cache"] = "static_kv_cache"

    def cache(self, options: CacheOptions) -> CacheOptions:
        return options.but(kind="static")
