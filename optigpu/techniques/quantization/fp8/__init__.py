"""fp8: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.quantization.fp8.technique import Fp8

__all__ = ["Fp8"]
