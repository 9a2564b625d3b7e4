"""The turns of processes that are measured side by side: when each is due, how long it is, and the rest after it.

What disturbs a machine comes and goes within tenths of a second. Processes whose turns are shorter than that meet the
same of it, and so their ratio stays the same.
"""

import time
from collections.abc import Iterator, Sequence

from optigpu.hardware.counters import cpu_clock_s, needs_cpu

TURN_S = 0.02
"""Seconds of a turn; a request that takes longer is a turn by itself."""
LOOK_S, AT_REST = 0.0005, 0.2
"""A process rests if no thread of it needs a CPU, and it used no more than this share of one core for so long."""
LONGEST_REST_S = 0.25
"""Libraries let threads wait for more work in a busy loop, for a fifth of a second at most."""
RESTS = 2
"""A turn is this many times as long as the rest that it needs."""


def turns_of(seconds: float, request_s: float, rest_s: float) -> int:
    """How many turns a round of so many seconds has, for a process with requests and rests of such lengths."""
    return max(1, round(seconds / max(TURN_S, request_s, RESTS * rest_s)))


def in_turns(counts: Sequence[int]) -> Iterator[int]:
    """Whose turn it is, by the position in `counts`: each has so many, evenly spread over the same time."""
    due = [((turn + 0.5) / count, place) for place, count in enumerate(counts) for turn in range(count)]
    return (place for _, place in sorted(due))


def rest_of(pid: int) -> float:
    """Waits until a process that has answered needs no CPU, so that others have them all for their turn.

    Returns how many seconds that took: LONGEST_REST_S at most, and 0 where the system does not count.
    """
    began, used_s = time.monotonic(), cpu_clock_s(pid)
    while used_s is not None and time.monotonic() - began < LONGEST_REST_S:
        time.sleep(LOOK_S)
        before_s, used_s = used_s, cpu_clock_s(pid)
        # A thread that waits for a CPU uses none, and of threads that wait for each other a look may see none at work.
        is_busy = needs_cpu(pid) or (used_s or 0.0) - before_s > AT_REST * LOOK_S
        if not is_busy:
            break
    return time.monotonic() - began
