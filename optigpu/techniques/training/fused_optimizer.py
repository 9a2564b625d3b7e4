from functools import partial
from typing import Literal

from optigpu.techniques.base import Choice, Expected, Model, Notes, Parts, TrainingTechnique


class FusedOptimizer(TrainingTechnique):
    """torch's AdamW or SGD with `fused`: each weight, its gradient and its moments are read and written once."""

    summary = "weights, gradients and moments are read and written once in an update"
    citation = "PyTorch documentation, torch.optim: foreach and fused implementations"
    expected = (
        Expected("literature", "faster than foreach, which is faster than a loop over the weights"),
        Expected("aim", "no change where the update is a small part of a step"),
    )
    choices = (Choice.OPTIMIZER,)

    name: Literal["fused_optimizer"] = "fused_optimizer"

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        from torch.optim import SGD, AdamW

        kind: type[AdamW | SGD] = AdamW if parts.rule.name == "adamw" else SGD
        return parts.but(optimizer=partial(kind, lr=parts.rule.learning_rate, fused=True))
