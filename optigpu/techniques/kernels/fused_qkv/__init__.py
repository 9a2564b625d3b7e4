"""fused_qkv: the technique and its parts."""

from optigpu.techniques.kernels.fused_qkv.technique import FusedQkv

__all__ = ["FusedQkv"]
