"""The model of what a decode step costs on so many threads, which `python -m benchmarks.threads` holds against speeds.

    step = max(bytes / bandwidth(threads), operations / (threads * rate)) + meetings * meeting(threads)

All threads share the memory's bandwidth, each computes at the rate of one, and all wait for each other at every
meeting.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepWork:
    """What a step reads and computes, and how often its threads meet."""

    bytes: float
    flops: float
    meets: int


@dataclass(frozen=True)
class Terms:
    """What a machine gives so many threads: bandwidth of all, operations of each, and the time of a meeting."""

    threads: int
    bytes_per_s: float
    flops_per_s: float
    meet_s: float


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step on more threads than could be measured; nobody has measured either."""

    threads: int
    least_s: float
    most_s: float


def step_s(work: StepWork, terms: Terms) -> float:
    """The model's seconds of a step."""
    return max(memory_s(work, terms), products_s(work, terms)) + meets_s(work, terms)


def memory_s(work: StepWork, terms: Terms) -> float:
    """Seconds of reading alone."""
    return work.bytes / terms.bytes_per_s


def products_s(work: StepWork, terms: Terms) -> float:
    """Seconds of products alone."""
    return work.flops / (terms.threads * terms.flops_per_s)


def meets_s(work: StepWork, terms: Terms) -> float:
    """Seconds of meetings alone."""
    return work.meets * terms.meet_s


def predicted(work: StepWork, measured: Sequence[Terms], threads: int) -> Predicted | None:
    """From the terms of fewer threads, the fewest first; None from those of one alone, which meets nobody.

    At best every thread adds the bandwidth of the first; at worst there is no more than has been measured. A meeting
    grows with the number of threads, which arrive one after the other at one counter.
    """
    first, last = measured[0], measured[-1]
    if last.threads < 2:
        return None
    meet_s = last.meet_s * threads / last.threads
    at_best = max(last.bytes_per_s, first.bytes_per_s * threads / first.threads)
    least, most = (
        step_s(work, Terms(threads, bandwidth, last.flops_per_s, meet_s))
        for bandwidth in (at_best, last.bytes_per_s)
    )
    return Predicted(threads, least, most)
