from typing import Literal

from optigpu.surgery.extras import KEEPS_A_CACHE
from optigpu.techniques.base import ON_TEXT, CacheOptions, CacheTechnique, Expected


class Int8KvCache(CacheTechnique):
    """Stores int8 keys and values and widens them for attention at every step, also in a static cache."""

    tasks = ON_TEXT
    summary = "keys and values as int8 with a scale for each token and head"
    citation = "Hooper et al., KVQuant, 2024, arXiv:2401.18079 (their keys have a scale per channel)"
    expected = (
        Expected(
            "arithmetic",
            "a cache of about a quarter of fp32's size, so longer contexts and larger batches fit",
        ),
        Expected("aim", "converting it back costs time at every step, most of all on a CPU"),
    )
    conflicts = KEEPS_A_CACHE
    error_bound = 0.1
    only_when_asked = True  # It saves memory and costs time

    name: Literal["int8_kv_cache"] = "int8_kv_cache"

    def cache(self, options: CacheOptions) -> CacheOptions:
        return options.but(int8=True)
