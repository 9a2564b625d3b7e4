"""cuda_graphs: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.compilation.cuda_graphs.technique import CudaGraphs

__all__ = ["CudaGraphs"]
