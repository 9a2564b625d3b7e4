"""tf32: float32 matrix products on tensor cores, with 10 bits of mantissa."""

from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.device_kinds import Ability, needs_capability
from optigpu.techniques.base import IN_TRAINING, ON_MODELS, Basis, Choice, Expected, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEEDED_CAPABILITY = (8, 0)
"""Ampere."""


class Tf32(Technique):
    """Lets this process's float32 matrix products and convolutions round what goes in to TF32; sums stay float32."""

    layer: ClassVar[Layer] = Layer.QUANTIZATION
    phase: ClassVar[Phase] = Phase.PRECISION
    tasks: ClassVar[tuple[Task, ...]] = (*ON_MODELS, *IN_TRAINING)
    summary: ClassVar[str] = (
        "float32 matrix products on tensor cores with 10 bits of mantissa; weights keep their size"
    )
    citation: ClassVar[str] = (
        "Choquette et al., NVIDIA A100 Tensor Core GPU: Performance and Innovation, IEEE Micro, 2021, "
        "doi:10.1109/MM.2021.3061394"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.LITERATURE,
            "the A100 multiplies matrices 8x as fast as in fp32",
        ),
        Expected(
            Basis.AIM,
            "prompts and batches several times as fast; no change where decoding is bound by memory",
        ),
    )
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.TF32,)
    choices: ClassVar[tuple[Choice, ...]] = (Choice.PRECISION,)
    error_bound: ClassVar[float] = 0.02
    process_wide: ClassVar[bool] = True

    name: Literal["tf32"] = "tf32"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """Ampere and later have it."""
        return needs_capability(environment, NEEDED_CAPABILITY, "TF32 matrix products")

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """bf16 is as fast there and halves the bytes as well; a stack holds one precision."""
        return False

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Sets torch's float32 precision for the whole process; the model is not changed."""
        import torch

        # Not `fp32_precision`, although torch 2.9 brought it: with that set, reading the older settings raises, which
        # TorchInductor does (torch 2.9 to 2.13).
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        notes.record(
            float32_matmul_precision=torch.get_float32_matmul_precision(),
            cudnn_tf32=torch.backends.cudnn.allow_tf32,
        )
