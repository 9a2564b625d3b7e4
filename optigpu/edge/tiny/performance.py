"""Performance mode: timed runs of at least 10 s and 10 inferences, five of them, and their median."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from optigpu.edge.tiny.device import Device, Inference
from optigpu.edge.tiny.errors import AnswerError

MARGIN = 1.05
"""More inferences than the last run says are needed, since a device's speed varies."""
MOST_INFERENCES = 1_000_000
CLOCK_SHARE, CLOCK_S = 0.02, 0.25
"""How far the device's and the host's time of a run may differ: by that share, and by a serial line's delays."""


@dataclass(frozen=True)
class Rules:
    """How long a run is, and how many there are. The defaults are MLPerf Tiny's."""

    seconds: float = 10.0
    inferences: int = 10
    runs: int = 5


def timed_runs(
    device: Device,
    data: bytes,
    warmup: int,
    rules: Rules | None = None,
    on_run: Callable[[Inference], None] = lambda _: None,
) -> list[Inference]:
    """Times the device on one input; a run that was too short is done again with more inferences.

    Raises TinyError; AnswerError for a device so fast or so unsteady that no run is long enough.
    """
    rules = rules or Rules()
    device.load(data)
    last = device.infer(1, 0)  # how long one takes at all
    last = device.infer(rules.inferences, warmup, expected_s(last, rules.inferences + warmup))
    runs: list[Inference] = []
    for _ in range(3 * rules.runs):
        count = enough(last, rules)
        last = device.infer(count, warmup, expected_s(last, count + warmup))
        if last.elapsed_us >= rules.seconds * 1e6:
            runs.append(last)
            on_run(last)
        if len(runs) == rules.runs:
            return runs
    raise AnswerError(
        f"The device's speed varies too much: {len(runs)} of {3 * rules.runs} runs took {rules.seconds:g} s or more."
    )


def enough(last: Inference, rules: Rules) -> int:
    """So many inferences take the time that a run needs, at the speed of the last one."""
    count = max(rules.inferences, math.ceil(rules.seconds * last.per_second * MARGIN))
    return min(count, MOST_INFERENCES)


def expected_s(last: Inference, count: int) -> float:
    """How long so many will take."""
    return count / last.per_second


def median_per_second(runs: list[Inference]) -> float:
    """The median of the runs' inferences per second."""
    return median(run.per_second for run in runs)


def clock_agrees(runs: list[Inference]) -> bool:
    """Whether the device's time of each run is the host's."""
    pairs = [(run.elapsed_us / 1e6, run.host_s) for run in runs]
    return all(abs(device_s - host_s) <= CLOCK_SHARE * host_s + CLOCK_S for device_s, host_s in pairs)
