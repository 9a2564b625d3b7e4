"""int8_hybrid: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.quantization.int8_hybrid.technique import Int8Hybrid

__all__ = ["Int8Hybrid"]
