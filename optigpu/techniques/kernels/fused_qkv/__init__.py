"""fused_qkv: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.kernels.fused_qkv.technique import FusedQkv

__all__ = ["FusedQkv"]
