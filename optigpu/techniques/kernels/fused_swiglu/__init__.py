"""fused_swiglu: the technique and its parts."""

from optigpu.techniques.kernels.fused_swiglu.technique import FusedSwiglu

__all__ = ["FusedSwiglu"]
