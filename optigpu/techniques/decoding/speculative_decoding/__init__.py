"""speculative_decoding: the technique and its parts."""

from optigpu.techniques.decoding.speculative_decoding.technique import SpeculativeDecoding

__all__ = ["SpeculativeDecoding"]
