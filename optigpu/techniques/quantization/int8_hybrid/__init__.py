"""int8_hybrid: the technique and its parts."""

from optigpu.techniques.quantization.int8_hybrid.technique import Int8Hybrid

__all__ = ["Int8Hybrid"]
