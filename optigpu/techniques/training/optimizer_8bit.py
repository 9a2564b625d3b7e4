"""optimizer_8bit: AdamW whose two states are 8-bit numbers."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from optigpu.documents.result import Environment
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.device_kinds import Ability
from optigpu.surgery.extras import Package
from optigpu.techniques.base import IN_TRAINING, Basis, Choice, Expected, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Parameter
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

    from optigpu.backends.training import TrainingParts


class Optimizer8bit(Technique):
    """bitsandbytes' AdamW: both moments in 8 bits, in blocks of 256 that share a scale, with the workload's settings.

    Tensors of fewer than `smallest` weights keep states of 32 bits. `paged` lets the driver move states to the host's
    memory when the GPU's is short. On a CPU the library computes in plain PyTorch: it is for memory there.
    """

    layer: ClassVar[Layer] = Layer.TRAINING
    phase: ClassVar[Phase] = Phase.TRAINING
    tasks: ClassVar[tuple[Task, ...]] = IN_TRAINING
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.OPTIMIZER_8BIT,)
    summary: ClassVar[str] = "AdamW with both moments in 8 bits"
    citation: ClassVar[str] = (
        "Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021, arXiv:2110.02861"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(Basis.ARITHMETIC, "2 bytes of states for each weight instead of 8"),
        Expected(
            Basis.MEASURED,
            "GPT-2, 4 documents of 128 tokens: a peak of 2021.0 MB instead of 2334.1",
            "training.md",
        ),
        Expected(Basis.LITERATURE, "the losses of states of 32 bits, without other hyperparameters"),
        Expected(Basis.AIM, "slower on a CPU, where one update is several operations of PyTorch"),
    )
    choices: ClassVar[tuple[Choice, ...]] = (Choice.OPTIMIZER,)
    error_bound: ClassVar[float] = 0.01

    name: Literal["optimizer_8bit"] = "optimizer_8bit"
    paged: bool = Field(
        False, description="Whether the driver may move states to the host's memory; on CUDA."
    )
    smallest: int = Field(
        4096, ge=1, description="The least number of weights of a tensor with 8-bit states."
    )

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """Only CUDA's driver moves pages; and the library must be installed."""
        if self.paged and device is not DeviceKind.CUDA:
            return "optimizer_8bit: paged states need CUDA; set paged to false."
        return super().check(environment, device, model)

    def packages(self, model: ModelFacts | None) -> tuple[Package, ...]:
        """The library is an extra."""
        return ("bitsandbytes",)

    def fits(self, workload: Any) -> str | None:
        """SGD without momentum has no states."""
        if workload.optimizer == "adamw":
            return None
        return f"optimizer_8bit is an AdamW, and the workload asks for {workload.optimizer}; set optimizer to adamw."

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """It is for memory, and on a CPU it costs time."""
        return False

    def training(self, parts: "TrainingParts", model: "PreTrainedModel", notes: Notes) -> "TrainingParts":
        """Makes an optimizer whose settings are those of torch's AdamW.

        Raises UnsupportedError for a model without a tensor that is large enough.
        """
        from bitsandbytes.optim import AdamW8bit

        large = [
            weight
            for weight in model.parameters()
            if weight.requires_grad and weight.numel() >= self.smallest
        ]
        if not large:
            raise UnsupportedError(
                f"optimizer_8bit keeps states of 32 bits for tensors of fewer than {self.smallest} weights, and this "
                "model trains no larger one; set smallest lower, or leave it out of the stack."
            )

        def make(weights: "Sequence[Parameter]") -> "Optimizer":
            rate = parts.rule.learning_rate
            made: Optimizer = AdamW8bit(weights, lr=rate, min_8bit_size=self.smallest, is_paged=self.paged)
            return made

        notes.record(tensors_with_8bit_states=len(large))
        return parts.but(optimizer=make)
