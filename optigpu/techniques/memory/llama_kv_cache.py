"""llama_kv_cache: what llama.cpp and ik_llama.cpp keep keys and values in."""

from typing import ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import Basis, EngineOptions, Expected, Phase, Technique, Trial
from optigpu.vocabulary import DeviceKind, Layer

Numbers = Literal["F16", "Q8_0", "Q4_0"]
BLOCK = 32
"""Numbers of a head that share a scale in ggml's Q8_0 and Q4_0."""


class LlamaKvCache(Technique):
    """Keeps keys and values in these of ggml's types. Values of 8 or 4 bits are read by flash attention alone, which is
    then what runs."""

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.CACHE
    backends: ClassVar[tuple[str, ...]] = ("llama_cpp", "ik_llama_cpp")
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)
    summary: ClassVar[str] = "llama.cpp's keys and values in 16, 8 or 4 bits"
    citation: ClassVar[str] = "Hooper et al., KVQuant, 2024, arXiv:2401.18079"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(Basis.ARITHMETIC, "32 numbers take 34 bytes in Q8_0 and 18 in Q4_0, where float16 takes 64"),
    )
    error_bound: ClassVar[float] = 0.1
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial(),
        Trial({"keys": "F16", "values": "F16"}, error_bound=0.01),
        Trial({"keys": "Q4_0", "values": "Q4_0"}, error_bound=0.5),
    )

    name: Literal["llama_kv_cache"] = "llama_kv_cache"
    keys: Numbers = "Q8_0"
    values: Numbers = "Q8_0"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """Blocks of 8 and 4 bits do not reach over the end of a head."""
        if model is not None and model.head_size % BLOCK and {self.keys, self.values} != {"F16"}:
            return (
                f"llama_kv_cache keeps heads in blocks of {BLOCK} numbers, and this model's have {model.head_size}; "
                "ask for F16."
            )
        return None

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """Only where it is asked for: it saves memory, and rounds."""
        return False

    def engine(self, options: EngineOptions) -> EngineOptions:
        """Says what keys and values are kept in."""
        return options.but(cache=self.keys, cache_values=self.values)
