"""native_decode: the technique and its parts."""

from optigpu.techniques.decoding.native_decode.technique import NativeDecode

__all__ = ["NativeDecode"]
