"""Detects whether a variant's requests became slower or faster while they were timed. Pure numpy.

The first third of the time is compared with the last: the medians of their requests must differ by more than a quarter,
a rank-sum test (Wilcoxon, Individual comparisons by ranking methods, 1945) must find it unlikely that they differ by
chance, and every stretch of the last third must lie beyond every one of the first: only a lasting change is reported.
Neighbouring requests resemble each other, so the test's variance is multiplied by (1 + r) / (1 - r), r being the
correlation of neighbours within a third (Box, Jenkins and Reinsel, Time Series Analysis, 1994, section 2.1). Assumed:
such a third is a straight line and noise.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optigpu.statistics.within import mid_ranks

Array = NDArray[np.float64]

LEAST_CHANGE = 0.25
"""The smallest change of the median that counts, relative to the smaller one."""
STRETCHES = 4
"""Stretches of equal time within each third."""
RISK = 0.001
FEWEST_REQUESTS = 24
"""With fewer requests, even thirds that do not overlap occur by chance more often than once in a thousand."""

_STRONGEST = 0.9
"""A higher correlation of neighbours cannot be distinguished from a trend."""


def drift(durations: Sequence[float] | Array) -> float | None:
    """The change of the median from the first third to the last of requests that took `durations` [n] > 0, relative to
    the first. None where there is no drift, or too few requests to show one."""
    values = np.asarray(durations, dtype=np.float64)
    if len(values) < FEWEST_REQUESTS:
        return None
    middle = (np.cumsum(values) - values / 2) / values.sum()
    first, last = values[middle < 1 / 3], values[middle > 2 / 3]
    if min(len(first), len(last)) == 0:
        return None
    ratio = float(np.median(last) / np.median(first))
    if max(ratio, 1 / ratio) - 1 <= LEAST_CHANGE or not _apart(values, middle):
        return None
    ranks = mid_ranks(np.concatenate((first, last)))
    thirds = ranks[: len(first)], ranks[len(first) :]
    # How far the last third's ranks are from what chance would give, in standard deviations.
    m, n = len(first), len(last)
    expected, variance = n * (m + n + 1) / 2, m * n * (m + n + 1) / 12
    score = float((thirds[1].sum() - expected) / math.sqrt(variance)) / math.sqrt(_inflation(*thirds))
    return ratio - 1 if math.erfc(abs(score) / math.sqrt(2)) < RISK else None


def _apart(values: Array, middle: Array) -> bool:
    """Whether the medians of the first third's stretches and those of the last third's do not overlap."""
    stretch = np.floor(middle * 3 * STRETCHES)
    medians = {int(number): float(np.median(values[stretch == number])) for number in np.unique(stretch)}
    early = [median for number, median in medians.items() if number < STRETCHES]
    late = [median for number, median in medians.items() if number >= 2 * STRETCHES]
    return max(early) < min(late) or max(late) < min(early)


def _inflation(*thirds: Array) -> float:
    """By how much correlation of neighbours multiplies the variance of a third's mean. The correlation is that of what
    remains beside a straight line through each third; of n numbers it comes out too low by about (2 + 4 r) / n, which
    is added."""
    rests = []
    for third in thirds:
        time = np.arange(len(third)) - (len(third) - 1) / 2
        centred = third - third.mean()
        rests.append(centred - (centred @ time) / max(float(time @ time), 1.0) * time)
    spread = sum(float(rest @ rest) for rest in rests)
    if spread == 0:
        return 1.0
    r = sum(float(rest[1:] @ rest[:-1]) for rest in rests) / spread
    n = sum(len(rest) for rest in rests) / len(rests)
    r = min(max(r + (2 + 4 * r) / n, 0.0), _STRONGEST)
    return (1 + r) / (1 - r)
