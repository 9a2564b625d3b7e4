from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.techniques.base import CacheTechnique, EngineOptions, Expected, OnCpuEngine, Trial
from optigpu.vocabulary import DeviceKind

Numbers = Literal["F16", "Q8_0", "Q4_0"]
BLOCK = 32
"""Numbers of a head that share a scale in ggml's Q8_0 and Q4_0."""


class LlamaKvCache(OnCpuEngine, CacheTechnique):
    """Keeps keys and values in these of ggml's types. Values of 8 or 4 bits are read by flash attention alone, which is
    then what runs."""

    backends = ("llama_cpp", "ik_llama_cpp")
    summary = "llama.cpp's keys and values in 16, 8 or 4 bits"
    citation = "Hooper et al., KVQuant, 2024, arXiv:2401.18079"
    expected = (
        Expected("arithmetic", "32 numbers take 34 bytes in Q8_0 and 18 in Q4_0, where float16 takes 64"),
    )
    error_bound = 0.1
    trials = (
        Trial(),
        Trial({"keys": "F16", "values": "F16"}, error_bound=0.01),
        Trial({"keys": "Q4_0", "values": "Q4_0"}, error_bound=0.5),
    )
    only_when_asked = True  # Only where it is asked for: it saves memory, and rounds

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

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(cache=self.keys, cache_values=self.values)
