"""optimizer_in_backward: each weight is updated within the backward pass, as soon as its gradient is there."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.techniques.base import IN_TRAINING, Basis, Choice, Expected, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from optigpu.backends.training import TrainingParts


class OptimizerInBackward(Technique):
    """A gradient is freed when its weight was updated, so that all of them never exist at once.

    The time of the updates counts as the backward pass's.
    """

    layer: ClassVar[Layer] = Layer.TRAINING
    phase: ClassVar[Phase] = Phase.TRAINING
    tasks: ClassVar[tuple[Task, ...]] = IN_TRAINING
    summary: ClassVar[str] = (
        "weights are updated within the backward pass, and each gradient is freed at once"
    )
    citation: ClassVar[str] = (
        "Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources, 2023, "
        "arXiv:2306.09782"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "the largest weight's gradient instead of all: 4 bytes less for each other weight, where gradients make "
            "the peak",
        ),
        Expected(Basis.AIM, "the same speed, or less where an update of many weights at once is faster"),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "gradient_accumulation": "gradients of several micro-batches are added up before a weight changes",
    }
    choices: ClassVar[tuple[Choice, ...]] = (Choice.WHOLE_GRADIENT,)

    name: Literal["optimizer_in_backward"] = "optimizer_in_backward"

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """It saves memory, not time."""
        return False

    def training(self, parts: "TrainingParts", model: "PreTrainedModel", notes: Notes) -> "TrainingParts":
        """The engine updates weights by hooks of their gradients."""
        notes.record(optimizer_in_backward=True)
        return parts.but(in_backward=True)
