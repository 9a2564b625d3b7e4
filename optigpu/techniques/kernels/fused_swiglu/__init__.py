"""fused_swiglu: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.kernels.fused_swiglu.technique import FusedSwiglu

__all__ = ["FusedSwiglu"]
