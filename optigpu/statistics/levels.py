"""Where the level of a history changes, by how much, and which versions changed with it."""

from itertools import pairwise

import numpy as np

from optigpu.documents.views import History, HistoryPoint, LevelChange
from optigpu.statistics.change_points import change_points
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
