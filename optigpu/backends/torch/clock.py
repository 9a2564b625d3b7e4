"""Clocks that run outside of what is measured: the host's for a CPU, recorded events for CUDA."""

import time
from itertools import pairwise
from typing import Any

from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Clock


class CpuClock:
    """perf_counter_ns: operators on a CPU are done when they return."""

    def mark(self) -> int:
        """The moment in nanoseconds."""
        return time.perf_counter_ns()

    def seconds(self, marks: list[Any]) -> list[float]:
        """Seconds between successive marks."""
        return [(later - earlier) / 1e9 for earlier, later in pairwise(marks)]


class CudaClock:
    """CUDA events: the device notes the moment when it gets there, and the host does not wait for it."""

    def mark(self) -> Any:
        """An event, recorded in the current stream."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: list[Any]) -> list[float]:
        """Seconds between successive events, after the one synchronization of a request."""
        marks[-1].synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]


def clock_for(device: DeviceKind) -> Clock:
    """The clock of a device."""
    return CudaClock() if device is DeviceKind.CUDA else CpuClock()
