"""A small fixed computation whose time shows how fast this machine computes at the moment.

It is the same each time, so that its times of one job compare with each other and with nothing else.
"""

import time

LOOPS, STEPS = 4, 8_000


def probe_s() -> float:
    """Seconds of the fastest of a few equal loops: one that another process interrupted is not the fastest."""
    return min(_timed_loop() for _ in range(LOOPS))


def _timed_loop() -> float:
    began = time.perf_counter()
    value = 1
    for step in range(STEPS):
        value = (value * 31 + step) & 0xFFFF
    return time.perf_counter() - began
