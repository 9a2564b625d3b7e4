"""Clocks that run outside of what is measured: the host's for a CPU, recorded events for a GPU."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from optigpu.hardware.device_kinds import torch_name
from optigpu.vocabulary import DeviceKind


class Clock(Protocol):
    """Marks moments on the device's own time line; reads them after the work is done."""

    def mark(self) -> Any:
        """A moment, cheap to take: nanoseconds on a CPU, a recorded event on a GPU."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between successive marks; waits for the device. Shape: len(marks) - 1."""


class CpuClock:
    """perf_counter_ns: operators on a CPU are done when they return."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def seconds(self, marks: Sequence[int]) -> list[float]:
        return [(later - earlier) / 1e9 for earlier, later in pairwise(marks)]


class EventClock:
    """Events of a GPU, of torch.cuda, torch.xpu or torch.mps: it notes the moment when it gets there."""

    def __init__(self, device: DeviceKind) -> None:
        self._device = torch.get_device_module(torch_name(device))

    def mark(self) -> Any:
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """After the one synchronization of a request, which waits for all streams."""
        self._device.synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]


def clock_for(device: DeviceKind) -> Clock:
    return CpuClock() if device is DeviceKind.CPU else EventClock(device)


def calls_s(call: Callable[[], object], count: int, clock: Clock) -> float:
    begin = clock.mark()
    for _ in range(count):
        call()
    return clock.seconds([begin, clock.mark()])[0]
