"""int8_kv_cache: keys and values stored as int8, with a scale for each token and head."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.techniques.base import ON_TEXT, Basis, CacheOptions, Expected, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task


class Int8KvCache(Technique):
    """Stores int8 keys and values and widens them for attention at every step, also in a static cache."""

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.CACHE
    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    summary: ClassVar[str] = "keys and values as int8 with a scale for each token and head"
    citation: ClassVar[str] = (
        "Hooper et al., KVQuant, 2024, arXiv:2401.18079 (their keys have a scale per channel)"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "a cache of about a quarter of fp32's size, so longer contexts and larger batches fit",
        ),
        Expected(
            Basis.AIM,
            "converting it back costs time at every step, most of all on a CPU",
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "one uses a key-value cache and the other disables it"
    }
    error_bound: ClassVar[float] = 0.1

    name: Literal["int8_kv_cache"] = "int8_kv_cache"

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """It saves memory and costs time."""
        return False

    def cache(self, options: CacheOptions) -> CacheOptions:
        """int8 in whichever cache the stack has."""
        return options.but(int8=True)
