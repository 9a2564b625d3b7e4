"""Means over independent units with Student's t: one sample, pairs, two samples of unequal spread (Welch), and parts of
one text (the jackknife). Everything works along the last axis.

Student, The Probable Error of a Mean, 1908; Welch, The Generalization of "Student's" Problem when Several Different
Population Variances are Involved, 1947.

The jackknife computes a figure of the windows of a text (or images, or items of a test) again without one part after
the other; how far it moves says how far another text would move it (Quenouille, Notes on Bias in Estimation, 1956;
Tukey, 1958). It serves every smooth function of means. Neighbouring windows resemble each other, so that at most 32
parts of consecutive windows are made.

And which of several points no other surpasses: intervals that overlap count as equal, and so does what is not known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bounds = tuple[float, float]
FURTHEST = 300.0
"""Logarithms beyond this are no figures, but an interval of two processes that have nothing in common."""

_STEPS = 4000
_MOST_FREEDOM = 1000.0
"""Beyond it t is the normal distribution to three digits."""


def t_quantile(probability: float, freedom: float) -> float:
    """The value below which t with so much freedom lies with `probability` (above a half), to four digits."""
    return _quantile(probability, round(min(freedom, _MOST_FREEDOM), 2))


def t_quantiles(probability: float, freedom: Array) -> Array:
    """`t_quantile` of each of `freedom` [...]."""
    if freedom.ndim == 0:
        return np.asarray(t_quantile(probability, float(freedom)))
    known, where = np.unique(np.round(np.minimum(freedom, _MOST_FREEDOM), 2), return_inverse=True)
    return np.array([_quantile(probability, each) for each in known.tolist()])[where].reshape(freedom.shape)


@lru_cache(maxsize=8192)
def _quantile(probability: float, freedom: float) -> float:
    # Beyond ten standard deviations of the angle there is nothing of a narrow density.
    angles, area = _angles(0.0, min(math.pi / 2, 10 / math.sqrt(freedom)), freedom)
    angle = float(np.interp(2 * probability - 1, area, angles))
    return math.sqrt(freedom) * math.tan(angle)


def _angles(first: float, last: float, freedom: float) -> tuple[Array, Array]:
    """Angles, and how often |t| lies between `first` and each of them: with t = sqrt(freedom) tan(angle), the density
    of the angle is proportional to cos(angle) ** (freedom - 1)."""
    angles = np.linspace(first, last, _STEPS + 1)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1]))) * ((last - first) / _STEPS / 2)
    half = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)) * math.sqrt(math.pi) / 2
    return angles, area / half


@dataclass(frozen=True)
class Estimate:
    """A centre and its standard error, [...] each: (centre - truth) / error is Student's t with so much freedom.

    The truth may lie as much as `below` or `above` the centre in addition: what disturbed a measurement moves it to one
    side, and more samples do not show by how much.
    """

    centre: Array
    error: Array
    freedom: Array
    below: float = 0.0
    above: float = 0.0

    def bounds(self, confidence: float = 0.95) -> tuple[Array, Array]:
        """The two-sided interval."""
        half = t_quantiles((1 + confidence) / 2, self.freedom) * self.error
        return self.centre - half - self.below, self.centre + half + self.above

    def chance(self) -> float:
        """How often an estimate is as far from 0 where the truth is 0: 1 less the largest confidence whose interval
        leaves 0 out."""
        error, freedom = float(self.error), min(float(self.freedom), _MOST_FREEDOM)
        away = max(float(self.centre) - self.below, -float(self.centre) - self.above)
        if away <= 0 or error <= 0:
            return 0.0 if away > 0 else 1.0
        return float(_angles(math.atan(away / error / math.sqrt(freedom)), math.pi / 2, freedom)[1][-1])

    def upper(self, confidence: float = 0.95) -> Array:
        return np.asarray(self.centre + t_quantiles(confidence, self.freedom) * self.error + self.above)


def factor_bounds(quotient: float, logarithm: Estimate, confidence: float = 0.95) -> Bounds | None:
    """The interval of a ratio whose logarithm is estimated; None where it has no bound worth the name."""
    low, high = map(float, logarithm.bounds(confidence))
    if max(abs(low), abs(high)) > FURTHEST:
        return None
    # The centre is the quotient's logarithm but for rounding.
    centre = float(logarithm.centre)
    return quotient * math.exp(low - centre), quotient * math.exp(high - centre)


def mean_of(units: Array) -> Estimate:
    """The mean of `units` [..., units], two at least. For pairs: of their differences."""
    count = units.shape[-1]
    centre = units.mean(axis=-1)
    error = units.std(axis=-1, ddof=1) / np.sqrt(count)
    return Estimate(np.asarray(centre), np.asarray(error), np.full(np.shape(centre), count - 1.0))


def difference(first: Estimate, second: Estimate) -> Estimate:
    """First minus second, of independent samples that may vary differently. The degrees of freedom are Welch's own:
    with Satterthwaite's the interval of 2 or 3 units would hold in 98%."""
    variances = first.error**2, second.error**2
    total = (variances[0] + variances[1]) ** 2
    spread = variances[0] ** 2 / (first.freedom + 2) + variances[1] ** 2 / (second.freedom + 2)
    least = np.array(np.minimum(first.freedom, second.freedom), dtype=np.float64)
    freedom = np.divide(total, spread, out=np.array(least + 2), where=spread > 0) - 2
    return Estimate(
        first.centre - second.centre,
        np.sqrt(variances[0] + variances[1]),
        np.maximum(freedom, least),
        below=first.below + second.above,
        above=first.above + second.below,
    )


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
        return factor_bounds(value, estimate_of_parts(np.log(value), np.log(without)))
    low, high = estimate_of_parts(np.asarray(value), np.asarray(without)).bounds()
    return float(low), float(high)


def share_bounds(share: float, count: int, without: Sequence[float]) -> Bounds | None:
    """The 95% interval of a share of `count` observations (Wilson, Probable Inference, 1927).

    The observations count as many as would vary as the parts do. Where all of them agree the parts do not vary, and
    still the share need not be 1: each observation counts.
    """
    if len(without) < FEWEST_PARTS:
        return None
    error = float(estimate_of_parts(np.asarray(share), np.asarray(without)).error)
    worth = share * (1 - share) / error**2 if error and 0 < share < 1 else float(count)
    t = t_quantile(0.975, len(without) - 1)
    centre = (share + t**2 / (2 * worth)) / (1 + t**2 / worth)
    half = t / (1 + t**2 / worth) * np.sqrt(share * (1 - share) / worth + t**2 / (4 * worth**2))
    low, high = (
        float(centre - half),
        float(centre + half),
    )  # of a share of 1 the upper one is 1 but for rounding
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def estimate_of_parts(value: Array, without: Array) -> Estimate:
    """A figure, from what it is without each of the parts; of two figures on the same parts their difference, or that
    of their logarithms."""
    count = len(without)
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return Estimate(np.asarray(value), np.asarray(error), np.asarray(count - 1.0))


Between = tuple[float, float] | None
"""What a point is in one objective, from its lowest to its highest value; more is better. None: not known."""


def unsurpassed(points: Sequence[Sequence[Between]]) -> list[int]:
    """The numbers of the points that no other surpasses; every point has the same objectives in the same order."""
    others, found = list(points), []
    for number, point in enumerate(points):
        winner = next((place for place, other in enumerate(others) if surpasses(other, point)), None)
        if winner is None:
            found.append(number)
        else:  # what surpasses one point is likely to surpass the next ones
            others.insert(0, others.pop(winner))
    return found


def surpasses(one: Sequence[Between], other: Sequence[Between]) -> bool:
    """Whether the first is as good in every objective and better in one."""
    better = False
    for ours, theirs in zip(one, other, strict=True):
        sign = compared(ours, theirs)
        if sign < 0:
            return False
        better = better or sign > 0
    return better


def compared(one: Between, other: Between) -> int:
    """1 where the first is better, -1 where the second is, 0 where that is not known."""
    if one is None or other is None:
        return 0
    (low, high), (other_low, other_high) = one, other
    return int(low > other_high) - int(high < other_low)
