"""optigpu's CUDAKernelOptimizer under a name of its own."""

from optigpu.facade.kernel_optimizer import CUDAKernelOptimizer as CUDAKernelOptimizer

__all__ = ["CUDAKernelOptimizer"]
