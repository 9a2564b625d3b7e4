"""Whether requests became slower or faster while they were timed, and where the level of a history changes.

Drift: the first third of the time is compared with the last: the medians of their requests must differ by more than a
quarter, a rank-sum test (Wilcoxon, Individual comparisons by ranking methods, 1945) must find it unlikely that they
differ by chance, and every stretch of the last third must lie beyond every one of the first: only a lasting change is
reported. Neighbouring requests resemble each other, so the test's variance is multiplied by (1 + r) / (1 - r), r being
the correlation of neighbours within a third (Box, Jenkins and Reinsel, Time Series Analysis, 1994, section 2.1).
Assumed: such a third is a straight line and noise.

Levels: changes are found by binary segmentation, each split tested by permutations. A split is where the means of both
sides differ most for their lengths (CUSUM). It counts if so large a difference is rare among shuffled orders of the
same values, which needs no assumption on their distribution. Both sides are then searched in the same way. After
Matteson and James, A nonparametric approach for multiple change point analysis of multivariate data, JASA 109 (2014),
with the mean as what changes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from optigpu.documents.views import History, HistoryPoint, LevelChange
from optigpu.statistics.within import mid_ranks
from optigpu.vocabulary import Better

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


def with_changes(history: History, series: int = 1) -> History:
    """The history with the changes of its level. Levels are compared by their ratio, so all values have to be
    positive; without that there are none. `series`: how many histories are looked at together."""
    points = history.points
    if not points or any(point.value <= 0 for point in points):
        return history
    logs = np.log([point.value for point in points])
    found = _changes(logs.tolist(), series)
    begins = [at for at, _ in found]
    means = [float(level.mean()) for level in np.split(logs, begins)]
    changes = tuple(
        _change(points[at - 1], points[at], float(np.exp(after - before)), history.better, chance)
        for (at, chance), (before, after) in zip(found, pairwise(means), strict=True)
    )
    return history.model_copy(update={"changes": changes})


def _change(
    before: HistoryPoint, after: HistoryPoint, ratio: float, better: Better, chance: float
) -> LevelChange:
    packages = dict.fromkeys((*before.versions, *after.versions))
    pairs = {name: (before.versions.get(name), after.versions.get(name)) for name in packages}
    return LevelChange(
        result_id=after.result_id,
        measured_at=after.measured_at,
        ratio=ratio,
        improved=(ratio > 1) is (better is Better.HIGHER),
        chance=chance,
        versions={name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
    )


Values = npt.NDArray[np.float64]

FEWEST = 8
"""Values that a search needs: of fewer, no order is rare enough."""
SHORTEST = 3
"""Values of a level: one outlier is none."""
PERMUTATIONS = 999
RARE = 0.05


def change_points(values: Sequence[float]) -> tuple[int, ...]:
    """The index of the first value of each new level, in order; in 5% of cases one where nothing changed."""
    return tuple(at for at, _ in _changes(values, series=1))


def discovered(chance: float, others: Iterable[float], rate: float = RARE) -> bool:
    """Whether a difference so rare by `chance` is taken for real beside those of all `others`: of all that are, in the
    mean at most the share `rate` are none (Benjamini and Hochberg, Controlling the False Discovery Rate, 1995)."""
    ordered = sorted([chance, *others])
    kept = [each for rank, each in enumerate(ordered, 1) if each <= rate * rank / len(ordered)]
    return bool(kept) and chance <= kept[-1]


def _changes(values: Sequence[float], series: int) -> tuple[tuple[int, float], ...]:
    """Each new level's first index, and how often so large a difference is one of chance."""
    # Of so many series a single change counts if it is rarer than RARE / series.
    draws = max(PERMUTATIONS, math.ceil(series / RARE))
    return tuple(_found(np.asarray(values, dtype=float), 0, np.random.default_rng(0), draws))


def _found(
    values: Values, offset: int, random: np.random.Generator, draws: int
) -> Iterator[tuple[int, float]]:
    if len(values) < FEWEST:
        return
    statistics = _statistics(values[None, :])[0]
    if statistics.max() <= 0:
        return
    chance = _chance(values, float(statistics.max()), random, draws)
    if chance > RARE:
        return
    split = int(statistics.argmax()) + SHORTEST
    yield from _found(values[:split], offset, random, draws)
    yield offset + split, chance
    yield from _found(values[split:], offset + split, random, draws)


def _chance(values: Values, largest: float, random: np.random.Generator, draws: int) -> float:
    """The share of shuffled orders whose largest statistic is as large. What is not rare is known after a few."""
    as_large = drawn = 0
    while drawn < draws and as_large < RARE * (PERMUTATIONS + 1):
        shuffled = random.permuted(np.broadcast_to(values, (PERMUTATIONS, len(values))), axis=1)
        as_large += int((_statistics(shuffled).max(axis=1) >= largest * (1 - 1e-12)).sum())
        drawn += PERMUTATIONS
    return (as_large + 1) / (drawn + 1)


def _statistics(series: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each series (rows) and each split that leaves SHORTEST values on both sides, the weighted difference."""
    count = series.shape[1]
    before = np.arange(SHORTEST, count - SHORTEST + 1)
    sums = np.cumsum(series, axis=1)
    left = sums[:, before - 1] / before
    right = (sums[:, -1:] - sums[:, before - 1]) / (count - before)
    weighted: npt.NDArray[np.float64] = np.abs(left - right) * np.sqrt(before * (count - before) / count)
    return weighted
