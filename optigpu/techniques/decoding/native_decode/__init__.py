"""native_decode: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.decoding.native_decode.technique import NativeDecode

__all__ = ["NativeDecode"]
