from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability, needs_capability
from optigpu.techniques.base import Expected, Model, Notes, Phase, TrainingTechnique, Trial
from optigpu.vocabulary import DeviceKind

NEEDED_CAPABILITY = (8, 9)
"""Ada and Hopper."""


class Fp8Training(TrainingTechnique):
    """Rounds both factors of each product of a linear layer to 8 bits, with one scale for each tensor.

    Activations and weights are e4m3, gradients e5m2, which has more range; scales follow each tensor's largest
    magnitude. Weights and updates keep their dtype, and so do the head, adapters' factors, and layers whose sizes are
    not multiples of 16.
    """

    phase = Phase.PLACEMENT
    summary = "products of linear layers in 8-bit floats, forward and backward, on fp8 tensor cores"
    citation = "Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433"
    expected = (
        Expected(
            "literature",
            "1.28x the tokens per second of the compiled bf16 model: Llama 3 8B on 8 H100",
            "Liang et al., TorchTitan, 2024, arXiv:2410.06511",
        ),
        Expected("arithmetic", "a byte for each stored input of a linear layer instead of two or four"),
        Expected("aim", "slower without compile_training, since rounding is several operations then"),
    )
    abilities = (Ability.FP8,)
    conflicts = dict.fromkeys(("qlora", "int8_finetune"), "its weights are stored in integers already")
    error_bound = 0.3
    trials = (Trial(), Trial(beside=("mixed_precision",)))
    only_when_asked = True  # Its losses depend on the model

    name: Literal["fp8_training"] = "fp8_training"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        return needs_capability(environment, NEEDED_CAPABILITY, "fp8 matrix products")

    def modules(self, model: Model, notes: Notes) -> None:
        """Exchanges the classes of linear layers in place; weights stay.

        Raises UnsupportedError, with the model left as it was, when it has no layer that 8-bit products take.
        """
        from optigpu.surgery.fp8_layers import train_in_fp8

        notes.record(fp8_layers=train_in_fp8(model), fp8_backend="torch._scaled_mm")
