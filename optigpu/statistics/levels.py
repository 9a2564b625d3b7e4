"""Where the level of a history changes, by how much, and which versions changed with it.

Changes are found by binary segmentation, each split tested by permutations. A split is where the means of both sides
differ most for their lengths (CUSUM). It counts if so large a difference is rare among shuffled orders of the same
values, which needs no assumption on their distribution. Both sides are then searched in the same way. After Matteson
and James, A nonparametric approach for multiple change point analysis of multivariate data, JASA 109 (2014), with the
mean as what changes.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from optigpu.documents.views import History, HistoryPoint, LevelChange
from optigpu.vocabulary import Better


def with_changes(history: History) -> History:
    """The history with the changes of its level. Levels are compared by their ratio, so all values have to be
    positive; without that there are none."""
    points = history.points
    if not points or any(point.value <= 0 for point in points):
        return history
    logs = np.log([point.value for point in points])
    begins = change_points(logs.tolist())
    means = [float(level.mean()) for level in np.split(logs, begins)]
    changes = tuple(
        _change(points[at - 1], points[at], float(np.exp(after - before)), history.better)
        for at, (before, after) in zip(begins, pairwise(means), strict=True)
    )
    return history.model_copy(update={"changes": changes})


def _change(before: HistoryPoint, after: HistoryPoint, ratio: float, better: Better) -> LevelChange:
    packages = dict.fromkeys((*before.versions, *after.versions))
    pairs = {name: (before.versions.get(name), after.versions.get(name)) for name in packages}
    return LevelChange(
        result_id=after.result_id,
        measured_at=after.measured_at,
        ratio=ratio,
        improved=(ratio > 1) is (better is Better.HIGHER),
        versions={name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
    )


Values = npt.NDArray[np.float64]

FEWEST = 8
"""Values that a search needs: of fewer, no order is rare enough."""
SHORTEST = 3
"""Values of a level: one outlier is none."""
PERMUTATIONS = 999
RARE = 0.05


def change_points(values: Sequence[float], seed: int = 0) -> tuple[int, ...]:
    """The index of the first value of each new level, in order; in 5% of cases one where nothing changed."""
    return tuple(_found(np.asarray(values, dtype=float), 0, np.random.default_rng(seed)))


def _found(values: Values, offset: int, random: np.random.Generator) -> Iterator[int]:
    if len(values) < FEWEST:
        return
    statistics = _statistics(values[None, :])[0]
    if statistics.max() <= 0:
        return
    shuffled = random.permuted(np.broadcast_to(values, (PERMUTATIONS, len(values))), axis=1)
    as_large = (_statistics(shuffled).max(axis=1) >= statistics.max() * (1 - 1e-12)).sum()
    if (as_large + 1) / (PERMUTATIONS + 1) > RARE:
        return
    split = int(statistics.argmax()) + SHORTEST
    yield from _found(values[:split], offset, random)
    yield offset + split
    yield from _found(values[split:], offset + split, random)


def _statistics(series: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each series (rows) and each split that leaves SHORTEST values on both sides, the weighted difference."""
    count = series.shape[1]
    before = np.arange(SHORTEST, count - SHORTEST + 1)
    sums = np.cumsum(series, axis=1)
    left = sums[:, before - 1] / before
    right = (sums[:, -1:] - sums[:, before - 1]) / (count - before)
    weighted: npt.NDArray[np.float64] = np.abs(left - right) * np.sqrt(before * (count - before) / count)
    return weighted
