"""What a decode step's time is made of: its kernels, and what lies between them. Pure arithmetic on intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

COSTLIEST = 5
"""Kernels that are named, by their time."""


class Interval(NamedTuple):
    """When a kernel, a copy or a fill ran on the device, on the profiler's clock."""

    name: str
    start_s: float
    end_s: float


class KernelTime(NamedTuple):
    """All of a step's launches of one kernel."""

    name: str
    launches: float
    seconds: float


@dataclass(frozen=True)
class Breakdown:
    """A step: the time in which at least one kernel ran, what is left of the step, and what was launched.

    `gap_s` is below 0 where the profiled kernels took longer than the step without a profiler.
    """

    step_s: float
    busy_s: float
    launches: float
    costliest: tuple[KernelTime, ...]

    @property
    def gap_s(self) -> float:
        return self.step_s - self.busy_s

    @property
    def gap_per_launch_s(self) -> float:
        return self.gap_s / self.launches


def breakdown(intervals: Sequence[Interval], steps: int, step_s: float) -> Breakdown:
    """Of `steps` profiled steps, each of which takes `step_s` without the profiler.

    Raises ValueError if there is no interval or no step, or an interval ends before it starts.
    """
    if not intervals or steps < 1:
        raise ValueError(
            f"A breakdown needs kernels and steps, not {len(intervals)} kernels in {steps} steps."
        )
    return Breakdown(step_s, busy(intervals) / steps, len(intervals) / steps, costliest(intervals, steps))


def busy(intervals: Sequence[Interval]) -> float:
    """Seconds in which at least one of them ran: what overlaps counts once."""
    total, until = 0.0, float("-inf")
    for name, start, end in sorted(intervals, key=lambda each: each.start_s):
        if end < start:
            raise ValueError(f"{name} ends before it starts.")
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def costliest(intervals: Sequence[Interval], steps: int) -> tuple[KernelTime, ...]:
    """The kernels that take the most time in a step, the costliest first."""
    seconds: dict[str, list[float]] = {}
    for name, start, end in intervals:
        seconds.setdefault(name, []).append(end - start)
    found = [KernelTime(name, len(each) / steps, sum(each) / steps) for name, each in seconds.items()]
    return tuple(sorted(found, key=lambda kernel: kernel.seconds, reverse=True)[:COSTLIEST])
