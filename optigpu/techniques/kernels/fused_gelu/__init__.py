"""fused_gelu: the technique and its parts."""

from optigpu.techniques.kernels.fused_gelu.technique import FusedGelu

__all__ = ["FusedGelu"]
