"""optigpu's GPUProfiler under a name of its own."""

from optigpu.facade.gpu_profiler import GPUProfiler as GPUProfiler

__all__ = ["GPUProfiler"]
