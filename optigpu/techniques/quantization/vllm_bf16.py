from typing import Literal

from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import DECODING, EngineOptions, Expected, LoadOptions, PrecisionTechnique


class VllmBf16(PrecisionTechnique):
    """Runs vLLM in bfloat16, for which it is made; keys and values are bfloat16 as well."""

    tasks = DECODING
    backends = ("vllm",)
    abilities = (Ability.VLLM,)
    summary = "vLLM's weights, activations and cache in bfloat16"
    citation = (
        "Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023, "
        "arXiv:2309.06180"
    )
    expected = (Expected("arithmetic", "half the bytes, so up to 2x where decoding is bound by memory"),)
    error_bound = 0.1

    name: Literal["vllm_bf16"] = "vllm_bf16"

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(weights="bfloat16")

    def load(self, options: LoadOptions) -> LoadOptions:
        """The same, for who predicts the bytes."""
        return options.but(dtype="bfloat16")
