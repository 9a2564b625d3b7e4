from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability, needs_capability
from optigpu.techniques.base import EVERYWHERE, Expected, Model, Notes, PrecisionTechnique
from optigpu.vocabulary import DeviceKind

NEEDED_CAPABILITY = (8, 0)
"""Ampere."""


class Tf32(PrecisionTechnique):
    """Lets this process's float32 matrix products and convolutions round what goes in to TF32; sums stay float32."""

    tasks = EVERYWHERE
    summary = "float32 matrix products on tensor cores with 10 bits of mantissa; weights keep their size"
    citation = (
        "Choquette et al., NVIDIA A100 Tensor Core GPU: Performance and Innovation, IEEE Micro, 2021, "
        "doi:10.1109/MM.2021.3061394"
    )
    expected = (
        Expected("literature", "the A100 multiplies matrices 8x as fast as in fp32"),
        Expected(
            "aim", "prompts and batches several times as fast; no change where decoding is bound by memory"
        ),
    )
    abilities = (Ability.TF32,)
    error_bound = 0.02
    process_wide = True
    only_when_asked = True  # bf16 is as fast there and halves the bytes as well; a stack holds one precision

    name: Literal["tf32"] = "tf32"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        return needs_capability(environment, NEEDED_CAPABILITY, "TF32 matrix products")

    def modules(self, model: Model, notes: Notes) -> None:
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
