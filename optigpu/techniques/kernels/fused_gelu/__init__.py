"""fused_gelu: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.kernels.fused_gelu.technique import FusedGelu

__all__ = ["FusedGelu"]
