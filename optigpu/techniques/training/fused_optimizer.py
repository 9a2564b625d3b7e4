"""fused_optimizer: the update of all weights in one kernel."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.techniques.base import IN_TRAINING, Basis, Choice, Expected, Notes, Phase, Technique
from optigpu.vocabulary import Layer, Task

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

    from optigpu.backends.training import TrainingParts


class FusedOptimizer(Technique):
    """torch's AdamW or SGD with `fused`: each weight, its gradient and its moments are read and written once."""

    layer: ClassVar[Layer] = Layer.TRAINING
    phase: ClassVar[Phase] = Phase.TRAINING
    tasks: ClassVar[tuple[Task, ...]] = IN_TRAINING
    summary: ClassVar[str] = "weights, gradients and moments are read and written once in an update"
    citation: ClassVar[str] = "PyTorch documentation, torch.optim: foreach and fused implementations"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(Basis.LITERATURE, "faster than foreach, which is faster than a loop over the weights"),
        Expected(Basis.AIM, "no change where the update is a small part of a step"),
    )
    choices: ClassVar[tuple[Choice, ...]] = (Choice.OPTIMIZER,)

    name: Literal["fused_optimizer"] = "fused_optimizer"

    def training(self, parts: "TrainingParts", model: "PreTrainedModel", notes: Notes) -> "TrainingParts":
        """The same rule in torch's fused implementation."""
        from torch.optim import SGD, AdamW

        kind: type[AdamW | SGD] = AdamW if parts.rule.name == "adamw" else SGD

        def make(weights: "Sequence[Parameter]") -> "Optimizer":
            return kind(weights, lr=parts.rule.learning_rate, fused=True)

        return parts.but(optimizer=make)
