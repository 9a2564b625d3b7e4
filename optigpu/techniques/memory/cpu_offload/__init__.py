"""cpu_offload: the technique and its parts."""

from optigpu.techniques.memory.cpu_offload.technique import CpuOffload

__all__ = ["CpuOffload"]
