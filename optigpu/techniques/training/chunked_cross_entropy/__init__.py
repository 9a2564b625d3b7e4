"""chunked_cross_entropy: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.training.chunked_cross_entropy.technique import ChunkedCrossEntropy

__all__ = ["ChunkedCrossEntropy"]
