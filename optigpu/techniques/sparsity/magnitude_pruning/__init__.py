"""magnitude_pruning: the technique and its parts."""

from optigpu.techniques.sparsity.magnitude_pruning.technique import MagnitudePruning

__all__ = ["MagnitudePruning"]
