"""Turns dropout off, so that the losses of two stacks differ by what the stacks change alone."""

from collections.abc import Iterator

from torch.nn import Module
from torch.nn.modules.dropout import _DropoutNd


def turn_off_dropout(model: Module) -> dict[str, float]:
    """Sets every probability of dropout to 0; returns what they were, as "GPT2Attention.dropout": 0.1.

    transformers keeps them in dropout layers and in numbers whose names contain "drop", for attention, whole layers and
    paths alike.
    """
    found: dict[str, float] = {}
    for module in model.modules():
        for name in list(_probabilities(module)):
            found[f"{type(module).__name__}.{name}"] = getattr(module, name)
            setattr(module, name, 0.0)
    return found


def _probabilities(module: Module) -> Iterator[str]:
    """The attributes of a module that are probabilities of dropout above 0."""
    for name, value in vars(module).items():
        is_one = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
        if is_one and isinstance(value, float) and value > 0:
            yield name
