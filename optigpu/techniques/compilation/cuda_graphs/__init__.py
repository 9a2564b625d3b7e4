"""cuda_graphs: the technique and its parts."""

from optigpu.techniques.compilation.cuda_graphs.technique import CudaGraphs

__all__ = ["CudaGraphs"]
