"""What autograd keeps for a backward pass."""

from collections.abc import Callable

import torch


def saved_by(run: Callable[[], object]) -> list[torch.Tensor]:
    """The tensors that a forward pass saves; one that several operations save is there several times."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        run()
    return saved
