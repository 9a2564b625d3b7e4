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
        """The moment in nanoseconds."""
        return time.perf_counter_ns()

    def seconds(self, marks: Sequence[int]) -> list[float]:
        """Seconds between successive marks."""
        return [(later - earlier) / 1e9 for earlier, later in pairwise(marks)]


class EventClock:
    """Events of a GPU: it notes the moment when it gets there, and the host does not wait for it.

    torch.cuda, torch.xpu and torch.mps each have a class for them, with the same methods and in milliseconds.
    """

    def __init__(self, device: DeviceKind) -> None:
        self._device = torch.get_device_module(torch_name(device))

    def mark(self) -> Any:
        """An event, recorded in the current stream."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between successive events, after the one synchronization of a request.

        It waits for all streams: work that was left on another one ends within the request, whose time by the host's
        clock then contradicts these.
        """
        self._device.synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]


def clock_for(device: DeviceKind) -> Clock:
    """The clock of a device."""
    return CpuClock() if device is DeviceKind.CPU else EventClock(device)


def calls_s(call: Callable[[], object], count: int, clock: Clock) -> float:
    """Seconds of `count` calls, one after the other."""
    begin = clock.mark()
    for _ in range(count):
        call()
    return clock.seconds([begin, clock.mark()])[0]
