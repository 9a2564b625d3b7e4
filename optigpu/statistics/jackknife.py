"""Intervals of figures over the windows of a text (or images, or items of a test): the jackknife over their parts.

A figure is computed again without one part after the other; how far it moves says how far another text would move it
(Quenouille, Notes on Bias in Estimation, 1956; Tukey, 1958). It serves every figure that is a smooth function of means,
differences and ratios of two results on the same windows included. Neighbouring windows resemble each other, so that at
most 32 parts of consecutive windows are made.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from optigpu.statistics.estimates import Estimate
from optigpu.statistics.intervals import Bounds, factor_bounds
from optigpu.statistics.student import Array, t_quantile

MOST_PARTS = 32
FEWEST_PARTS = 5
"""With fewer, the spread of the parts is known too badly."""

Statistic = Callable[[NDArray[np.bool_]], float]
"""A figure of the observations that are kept."""


def parts_of(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """The part, from 0, of each observation [n] whose window's number from 0 is in `units` [n]."""
    count = int(units.max()) + 1
    return units * min(MOST_PARTS, count) // count


def leave_one_out(statistic: Statistic, parts: NDArray[np.int64]) -> tuple[float, ...]:
    """The figure without each of the parts; empty where there are too few parts for an interval."""
    numbers = np.unique(parts)
    if len(numbers) < FEWEST_PARTS:
        return ()
    return tuple(statistic(parts != number) for number in numbers.tolist())


def part_bounds(value: float, without: Sequence[float]) -> Bounds | None:
    """The 95% interval of a figure, on a logarithmic scale where it is positive; None where there are too few parts."""
    if len(without) < FEWEST_PARTS or not np.isfinite(without).all():
        return None
    if min(value, *without) > 0:
        return factor_bounds(value, _estimate(np.log(value), np.log(without)))
    low, high = _estimate(np.asarray(value), np.asarray(without)).bounds()
    return float(low), float(high)


def share_bounds(share: float, count: int, without: Sequence[float]) -> Bounds | None:
    """The 95% interval of a share of `count` observations (Wilson, Probable Inference, 1927).

    The observations count as many as would vary as the parts do. Where all of them agree the parts do not vary, and
    still the share need not be 1: each observation counts.
    """
    if len(without) < FEWEST_PARTS:
        return None
    error = float(_estimate(np.asarray(share), np.asarray(without)).error)
    worth = share * (1 - share) / error**2 if error and 0 < share < 1 else float(count)
    t = t_quantile(0.975, len(without) - 1)
    centre = (share + t**2 / (2 * worth)) / (1 + t**2 / worth)
    half = t / (1 + t**2 / worth) * np.sqrt(share * (1 - share) / worth + t**2 / (4 * worth**2))
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def ratio_of_parts(ratio: float, above: Sequence[float], below: Sequence[float]) -> Estimate:
    """The logarithm of a ratio of two positive figures on the same parts."""
    return _estimate(np.log(ratio), np.log(above) - np.log(below))


def difference_of_parts(difference: float, first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The difference of two figures on the same parts."""
    return _estimate(np.asarray(difference), np.asarray(first) - np.asarray(second))


def _estimate(value: Array, without: Array) -> Estimate:
    count = len(without)
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return Estimate(np.asarray(value), np.asarray(error), np.asarray(count - 1.0))
