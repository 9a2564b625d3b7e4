"""speculative_decoding: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.decoding.speculative_decoding.technique import SpeculativeDecoding

__all__ = ["SpeculativeDecoding"]
