"""vllm_bf16: vLLM's weights, activations and cache in bfloat16."""

from typing import ClassVar, Literal

from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import Basis, Choice, EngineOptions, Expected, LoadOptions, Phase, Technique
from optigpu.vocabulary import Layer


class VllmBf16(Technique):
    """Runs vLLM in bfloat16, for which it is made; keys and values are bfloat16 as well."""

    layer: ClassVar[Layer] = Layer.QUANTIZATION
    phase: ClassVar[Phase] = Phase.PRECISION
    backends: ClassVar[tuple[str, ...]] = ("vllm",)
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.VLLM,)
    summary: ClassVar[str] = "vLLM's weights, activations and cache in bfloat16"
    citation: ClassVar[str] = (
        "Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023, "
        "arXiv:2309.06180"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(Basis.ARITHMETIC, "half the bytes, so up to 2x where decoding is bound by memory"),
    )
    choices: ClassVar[tuple[Choice, ...]] = (Choice.PRECISION,)
    error_bound: ClassVar[float] = 0.1

    name: Literal["vllm_bf16"] = "vllm_bf16"

    def engine(self, options: EngineOptions) -> EngineOptions:
        """Loads the weights as bfloat16."""
        return options.but(weights="bfloat16")

    def load(self, options: LoadOptions) -> LoadOptions:
        """The same, for who predicts the bytes."""
        return options.but(dtype="bfloat16")
