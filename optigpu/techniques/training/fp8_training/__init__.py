"""fp8_training: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.training.fp8_training.technique import Fp8Training

__all__ = ["Fp8Training"]
