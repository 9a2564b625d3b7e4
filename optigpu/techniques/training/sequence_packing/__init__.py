"""sequence_packing: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.training.sequence_packing.technique import SequencePacking

__all__ = ["SequencePacking"]
