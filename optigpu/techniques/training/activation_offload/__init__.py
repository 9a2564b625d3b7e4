"""activation_offload: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.training.activation_offload.technique import ActivationOffload

__all__ = ["ActivationOffload"]
