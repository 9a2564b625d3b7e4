"""magnitude_pruning: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.sparsity.magnitude_pruning.technique import MagnitudePruning

__all__ = ["MagnitudePruning"]
