"""What a run of a load comes to: its latencies, its goodput, its queue, and whether its counts fit together.

Whether a queue grows is Mann and Kendall's test (Mann, Nonparametric Tests Against Trend, 1945), and how fast Theil and
Sen's slope (Sen, Estimates of the Regression Coefficient Based on Kendall's Tau, 1968).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.rounds import LittlesLaw, LoadRun
from optigpu.load.served import Run, Seen, Served

Array = NDArray[np.float64]

WINDOWS = 12
"""Parts of equal time that the arrivals of a run are looked at in."""
RISK = 0.01
LEAST_GROWTH = 0.1
"""A queue that grows by a smaller share of the arrivals is not told from one that comes and goes."""
POINTS = 64
"""Of the queue over time."""


@dataclass(frozen=True)
class Limits:
    """The most that a request may take for its first token, and for each after it; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def are_met_by(self, served: Served) -> bool:
        return (
            served.error is None
            and (self.ttft_s is None or served.ttft_s <= self.ttft_s)
            and (self.tpot_s is None or served.tpot_s <= self.tpot_s)
        )


def figures_of(run: Run, limits: Limits, *, is_open: bool) -> LoadRun:
    """The figures of a run; `is_open` says that queries arrive whether or not earlier ones have ended."""
    served = [each for each in run.served if each.error is None]
    failures = [each for each in run.served if each.error is not None]
    met = sum(map(limits.are_met_by, served))
    queue = Queue(run.served, run.seconds)
    per_s, is_without_end = queue.growth() if is_open else (None, None)
    return LoadRun(
        seconds=run.seconds,
        sent_s=tuple(each.intended_s for each in served),
        prompt_tokens=tuple(each.query.prompt_tokens for each in served),
        output_tokens=tuple(each.count for each in served),
        ttft_s=tuple(each.ttft_s for each in served),
        tpot_s=tuple(each.tpot_s for each in served),
        latency_s=tuple(each.latency_s for each in served),
        goodput_per_s=met / run.seconds,
        met=met,
        waiting=queue.mean(0.0, run.seconds),
        queue=queue.points(),
        growth=per_s,
        saturated=is_without_end,
        law=littles_law(run.served, run.seen, run.seconds),
        failed=len(failures),
        error=failures[0].error if failures else None,
    )


def littles_law(served: Sequence[Served], seen: Sequence[Seen], seconds: float) -> LittlesLaw:
    """The law over a whole run: the server's own counter on one side, the queries' moments on the other."""
    moments = np.array([each.moment_s for each in seen] + [seconds])
    counts = np.array([each.count for each in seen], dtype=np.float64)
    return LittlesLaw(
        counted=float((counts * np.diff(moments)).sum() / seconds),
        rate=len(served) / seconds,
        latency_s=sum(each.latency_s for each in served) / len(served),
        late_s=sum(each.late_s for each in served) / len(served),
        tolerance=min(each.latency_s - each.late_s for each in served) / seconds / 2,
    )


class Queue:
    """The queries that have arrived and have no token yet, over the time of a run."""

    def __init__(self, served: Sequence[Served], seconds: float) -> None:
        self._seconds = seconds
        self._arrived = np.sort(np.array([each.intended_s for each in served]))
        self._joined = np.sort(np.array([each.first_s for each in served]))

    def mean(self, begin_s: float, end_s: float) -> float:
        if end_s <= begin_s:
            return 0.0
        # For each moment, how much of the interval lies after it.
        arrived, joined = (
            float((end_s - np.clip(moments, begin_s, end_s)).sum())
            for moments in (self._arrived, self._joined)
        )
        return (arrived - joined) / (end_s - begin_s)

    def points(self) -> tuple[tuple[float, float], ...]:
        """The mean of each of POINTS parts of the run, at the part's end."""
        ends = np.linspace(0.0, self._seconds, POINTS + 1).tolist()
        return tuple((end, self.mean(begin, end)) for begin, end in pairwise(ends))

    def growth(self) -> tuple[float, bool] | tuple[None, None]:
        """By how many queries a second the queue grew while they arrived, and whether without an end; None for both
        where they all came at once. It has no end where the parts of that time show a trend that is no chance, and
        where more than a few of the arrivals stay: neighbouring parts resemble each other, so that the test alone
        would often be wrong."""
        begin_s, end_s = float(self._arrived[0]), float(self._arrived[-1])
        if end_s <= begin_s:
            return None, None
        ends = np.linspace(begin_s, end_s, WINDOWS + 1)
        means = np.array([self.mean(a, b) for a, b in pairwise(ends.tolist())])
        per_s = slope((ends[:-1] + ends[1:]) / 2, means)
        rate = len(self._arrived) / (end_s - begin_s)
        return per_s, per_s > LEAST_GROWTH * rate and growth_risk(means) < RISK


def growth_risk(values: Array) -> float:
    """The probability that chance alone makes independent `values` [n] grow as steadily as these, by the normal
    approximation with ties; 1 for fewer than 4."""
    n = len(values)
    if n < 4:
        return 1.0
    later, earlier = np.triu_indices(n, 1)[::-1]
    score = float(np.sign(values[later] - values[earlier]).sum())
    _, ties = np.unique(values, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if score <= 0 or variance <= 0:
        return 1.0
    return math.erfc((score - 1) / math.sqrt(2 * variance)) / 2


def slope(moments: Array, values: Array) -> float:
    """The median of the slopes between all pairs of points, of `values` [n] at growing `moments` [n]."""
    later, earlier = np.triu_indices(len(values), 1)[::-1]
    return float(np.median((values[later] - values[earlier]) / (moments[later] - moments[earlier])))
