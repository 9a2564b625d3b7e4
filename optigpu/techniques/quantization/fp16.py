"""fp16: weights and activations in IEEE half precision."""

from typing import ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.techniques.base import ON_MODELS, Basis, Choice, Expected, LoadOptions, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task


class Fp16(Technique):
    """Loads the model in float16."""

    layer: ClassVar[Layer] = Layer.QUANTIZATION
    phase: ClassVar[Phase] = Phase.PRECISION
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    summary: ClassVar[str] = "weights and activations in IEEE half precision"
    citation: ClassVar[str] = "Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "half the bytes, so up to 2x where decoding is bound by memory",
        ),
    )
    choices: ClassVar[tuple[Choice, ...]] = (Choice.PRECISION,)
    error_bound: ClassVar[float] = 0.02

    name: Literal["fp16"] = "fp16"

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """CPUs compute float16 slowly; on GPUs bf16 has the same speed and more range."""
        return False

    def load(self, options: LoadOptions) -> LoadOptions:
        """Loads the weights as float16."""
        return options.but(dtype="float16")
