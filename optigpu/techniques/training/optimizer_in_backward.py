from collections.abc import Mapping
from typing import ClassVar, Literal

from optigpu.techniques.base import Choice, Expected, Model, Notes, Parts, TrainingTechnique


class OptimizerInBackward(TrainingTechnique):
    """A gradient is freed when its weight was updated, so that all of them never exist at once.

    The time of the updates counts as the backward pass's.
    """

    summary = "weights are updated within the backward pass, and each gradient is freed at once"
    citation = (
        "Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources, 2023, "
        "arXiv:2306.09782"
    )
    expected = (
        Expected(
            "arithmetic",
            "the largest weight's gradient instead of all: 4 bytes less for each other weight, where gradients make "
            "the peak",
        ),
        Expected("aim", "the same speed, or less where an update of many weights at once is faster"),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "gradient_accumulation": "gradients of several micro-batches are added up before a weight changes"
    }
    choices = (Choice.WHOLE_GRADIENT,)
    only_when_asked = True  # It saves memory, not time

    name: Literal["optimizer_in_backward"] = "optimizer_in_backward"

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        notes.record(optimizer_in_backward=True)
        return parts.but(in_backward=True)
