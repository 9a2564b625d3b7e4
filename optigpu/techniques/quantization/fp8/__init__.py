"""fp8: the technique and its parts."""

from optigpu.techniques.quantization.fp8.technique import Fp8

__all__ = ["Fp8"]
