from typing import Literal

from optigpu.surgery.extras import KEEPS_A_CACHE
from optigpu.techniques.base import CacheOptions, CacheTechnique, Expected


class StaticKvCache(CacheTechnique):
    """A cache of the request's full length instead of one that grows by concatenation."""

    summary = "keys and values in buffers allocated once, so that shapes never change"
    citation = "gpt-fast, pytorch.org/blog/accelerating-generative-ai-2, 2023"
    expected = (Expected("aim", "little alone; it makes one compiled decode step possible"),)
    conflicts = KEEPS_A_CACHE

    name: Literal["static_kv_cache"] = "static_kv_cache"

    def cache(self, options: CacheOptions) -> CacheOptions:
        return options.but(kind="static")
