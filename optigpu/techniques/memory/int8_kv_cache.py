from collections.abc import Mapping
from typing import ClassVar, Literal

from optigpu.techniques.base import ON_TEXT, CacheOptions, Expected, Phase, Technique
from optigpu.vocabulary import Layer


class Int8KvCache(Technique):
    """Stores int8 keys and values and widens them for attention at every step, also in a static cache."""

    layer = Layer.MEMORY
    phase = Phase.CACHE
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
    conflicts: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "one uses a key-value cache and the other disables it"
    }
    error_bound = 0.1
    only_when_asked = True  # It saves memory and costs time

    name: Literal["int8_kv_cache"] = "int8_kv_cache"

    def cache(self, options: CacheOptions) -> CacheOptions:
        return options.but(int8=True)
