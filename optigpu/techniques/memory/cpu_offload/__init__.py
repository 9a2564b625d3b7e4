"""cpu_offload: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.memory.cpu_offload.technique import CpuOffload

__all__ = ["CpuOffload"]
