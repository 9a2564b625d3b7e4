"""The median of one process's requests, which resemble their neighbours: its interval and how many requests count.

The median of the process lies between the quantiles 0.5 - h and 0.5 + h of its requests. h is Student's t times the
standard error of the share of requests below the median. That error comes from the first few cosine transforms of
"above or below" (equal-weighted cosines: Lazarus, Lewis, Stock and Watson, HAR Inference, 2018), each divided by what a
first-order autoregression with the requests' own correlation says of its frequency (prewhitening: Andrews and Monahan,
1992). Assumed: the requests vary about one level; a lasting change is left to the verdict (`drift`). Everything works
along the last axis.

Two processes that took turns are compared by the turns that followed each other, since what slows a machine down for
longer than a turn slows both down. Pairs in whose midst the machine changed are far off, to either side: the median of
the means of two differences hardly moves for them, and is nearly as precise as the mean where there are none (Hodges
and Lehmann, Estimates of Location Based on Rank Tests, 1963).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.rounds import RoundRecord
from optigpu.statistics.estimates import Array, t_quantile

FEWEST_REQUESTS = 6
"""With fewer requests of a process nothing is known of how much they vary."""
FEWEST_FOR_INTERVAL = 24
"""With fewer, a correlation of 0.9 cannot be told from none, and an interval would hold too rarely."""

_STRONGEST = 0.97
"""A higher correlation of neighbours cannot be told from a trend."""
_REACH = 0.42
"""Beyond the quantiles 0.5 +- 0.42 the sorted requests are too few, and the interval goes on in a straight line."""
_TERMS = 64

FURTHER = 3.0
"""How many times the requests so far may be foreseen."""
FEWEST_APART = 15
"""Requests that a process ends with at least, those that resemble each other counting as one."""
_FEWEST_COSINES, _MOST_COSINES = 4, 32


def freedom_of(count: int) -> int:
    """The number of cosine transforms for so many requests: few, so that each is slower than their correlation."""
    if count < 30:
        return 2
    return 3 if count < 60 else min(max(4, count // 50), 16)


def median_bounds(values: Array) -> tuple[Array, Array]:
    """The 95% interval of the median of the process that `values` [..., requests] come from."""
    freedom = freedom_of(values.shape[-1])
    return _quantiles_around(values, t_quantile(0.975, freedom) * share_error(values, freedom))


def median_error(values: Array) -> Array:
    """The standard error of the median: half of what lies between the quantiles one standard error away from 0.5."""
    low, high = _quantiles_around(values, share_error(values, freedom_of(values.shape[-1])))
    return np.asarray((high - low) / 2)


def enough_for(values: Array, width: float) -> tuple[Array, NDArray[np.bool_]]:
    """How many requests [...] a process that gave `values` [..., n] needs until median -+ 1.96 standard errors are as
    wide as `width`, relative to the median; n to FURTHER n. And whether it ends with so many, or is looked at again.

    Whoever ends at the first narrow interval ends where it is narrow by chance. Here an interval says when to end, and
    what comes after it corrects it, as in Stein's two stages (A Two-Sample Test for a Linear Hypothesis Whose Power is
    Independent of the Variance, 1945). Its error comes from many cosine transforms: it need be steady, where that of a
    result must be right of slow waves too.
    """
    count = values.shape[-1]
    median = np.abs(np.median(values, axis=-1))
    if count < FEWEST_REQUESTS:
        return np.full_like(median, FURTHER * count), np.zeros_like(median, dtype=bool)
    error = share_error(values, min(max(_FEWEST_COSINES, count // 4), _MOST_COSINES))
    low, high = _quantiles_around(values, 1.96 * error)
    found = np.divide(high - low, median, out=np.full_like(median, np.inf), where=median > 0)
    correlation = neighbour_correlation(values)
    apart = FEWEST_APART * (1 + correlation) / (1 - correlation)
    needed = np.maximum(count * (found / width) ** 2, apart)
    return np.clip(needed, count, FURTHER * count), needed <= FURTHER * count


def dependence(values: Array) -> Array:
    """How many of `values` [..., requests] in a row count as one: around 1 for independent ones. One process's own
    figure is known badly; the mean of several is better."""
    count = values.shape[-1]
    # What equals the median is on neither side: of a coarse clock that may be most requests.
    aside = (values != np.median(values, axis=-1, keepdims=True)).mean(axis=-1)
    variance = count * share_error(values, max(4, freedom_of(count))) ** 2
    return np.asarray(np.divide(4 * variance, aside, out=np.ones_like(variance), where=aside > 0))


def share_error(values: Array, freedom: int) -> Array:
    """The standard error of the share of `values` [..., n] below the true median, by so many cosine transforms."""
    count = values.shape[-1]
    correlation = neighbour_correlation(values)
    sides = np.sign(values - np.median(values, axis=-1, keepdims=True)) / 2
    frequencies = np.pi * np.arange(1, freedom + 1) / count
    cosines = np.sqrt(2 / count) * np.cos(np.outer(np.arange(count) + 0.5, frequencies))
    power = (sides @ cosines) ** 2
    whole = _spectrum(correlation, np.zeros(1))
    level = (power * whole / _spectrum(correlation, frequencies)).mean(axis=-1)
    # A stretch of correlated requests varies less than its process does.
    rest = 1 - correlation
    lags = correlation / rest - correlation * (1 - correlation**count) / (count * rest**2)
    varies = np.maximum(1 - (1 + 2 * lags) / count, 0.1)
    return np.asarray(np.sqrt(level / count / varies))


def neighbour_correlation(values: Array) -> Array:
    """The correlation of neighbours [...], from 0 to 0.97, from ranks: a few long requests do not hide it.

    Of n numbers it comes out too low by (1 + 4 r) / n (Kendall, Note on Bias in the Estimation of Autocorrelation,
    1954), which is added.
    """
    count = values.shape[-1]
    ranks = mid_ranks(values)
    ranks = ranks - ranks.mean(axis=-1, keepdims=True)
    spread = (ranks**2).sum(axis=-1)
    product = (ranks[..., 1:] * ranks[..., :-1]).sum(axis=-1)
    by_rank = np.divide(product, spread, out=np.zeros_like(product), where=spread > 0)
    found = 2 * np.sin(np.pi / 6 * by_rank)
    corrected = (count * found + 1) / (count - 4) if count > 8 else found + (1 + 4 * found) / count
    return np.asarray(np.clip(corrected, 0.0, _STRONGEST))


def mid_ranks(values: Array) -> Array:
    """Ranks from 1 along the last axis; equal values share the middle of theirs."""
    return (_ranks(values) + _ranks(values[..., ::-1])[..., ::-1]) / 2


def _ranks(values: Array) -> Array:
    order = np.argsort(values, axis=-1, kind="stable")
    return np.asarray(np.argsort(order, axis=-1, kind="stable") + 1.0)


def _spectrum(correlation: Array, frequencies: Array) -> Array:
    """The spectrum of "above or below" of a Gaussian autoregression, [..., frequencies]; it is 1 without correlation.
    The correlation of the signs is 2 / pi arcsin(r ** lag) (Sheppard, 1899); the terms of arcsin's series are
    geometric in the lag and are summed in closed form."""
    term = np.arange(_TERMS)
    log_weight = np.array([math.lgamma(2 * m + 1) - 2 * math.lgamma(m + 1) - m * math.log(4) for m in term])
    weight = 2 / np.pi * np.exp(log_weight) / (2 * term + 1)
    power = correlation[..., None, None] ** (2 * term + 1)  # [..., 1, terms]
    cosine = np.cos(frequencies)[:, None]  # [frequencies, 1]
    return np.asarray(((1 - power**2) / (1 - 2 * power * cosine + power**2)) @ weight + 1 - weight.sum())


def _quantiles_around(values: Array, reach: Array) -> tuple[Array, Array]:
    """The quantiles 0.5 - reach [...] and 0.5 + reach of `values` [..., n], continued in a straight line."""
    count = values.shape[-1]
    ordered = np.sort(values, axis=-1)
    median = np.median(values, axis=-1)
    inside = np.minimum(reach, min(0.5 - 0.5 / count, _REACH))
    factor = np.divide(reach, inside, out=np.ones_like(reach), where=inside > 0)
    low, high = (sorted_quantile(ordered, 0.5 + sign * inside) for sign in (-1, 1))
    below, above = np.minimum(low, median) - median, np.maximum(high, median) - median
    return np.asarray(median + factor * below), np.asarray(median + factor * above)


def sorted_quantile(ordered: Array, share: Array) -> Array:
    """The quantile at `share` [...] of `ordered` [..., n], whose k-th value stands at (k - 0.5) / n."""
    count = ordered.shape[-1]
    place = np.clip(share * count - 0.5, 0, count - 1)
    below = np.minimum(np.floor(place).astype(np.int64), count - 2)
    first, second = (
        np.take_along_axis(ordered, index[..., None], axis=-1)[..., 0] for index in (below, below + 1)
    )
    return np.asarray(first + (place - below) * (second - first))


MOST_DIFFERENCES = 2000
"""Of more differences the means of so many runs of neighbours are taken first: every two grow with the square."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Timed:
    """A process's rounds, and its samples of one metric: one for each request."""

    records: Sequence[RoundRecord]
    samples: Sequence[float]


def ratio_of_turns(ours: Timed, theirs: Timed) -> float | None:
    """How many times theirs our figure is. None where no round that is counted on both sides had turns on both, or
    where one of their samples is not positive."""
    shared = [
        number
        for number, both in enumerate(zip(ours.records, theirs.records, strict=False))
        if all(record.counted and record.turns for record in both)
    ]
    if not shared:
        return None
    samples: list[Array] = []
    for side in (ours, theirs):
        ends = list(accumulate(record.requests for record in side.records))
        parts = [side.samples[ends[each] - side.records[each].requests : ends[each]] for each in shared]
        samples.append(np.concatenate(parts, dtype=np.float64))
    if min(float(each.min()) for each in samples) <= 0:
        return None
    turns = [[side.records[number].turns for number in shared] for side in (ours, theirs)]
    counts = [min(map(len, both)) for both in zip(*turns, strict=True)]
    sizes = [np.concatenate(list(map(_sizes, side, counts))) for side in turns]
    above, below = map(_medians, samples, sizes)
    return math.exp(middle(np.log(above) - np.log(below)))


def _sizes(turns: Sequence[int], count: int) -> Counts:
    groups = (2 * np.arange(len(turns)) + 1) * count // (2 * len(turns))
    return np.bincount(groups, weights=turns, minlength=count).astype(np.int64)


def _medians(values: Array, sizes: Counts) -> Array:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    ordered = values[np.lexsort((values, groups))]
    starts = np.cumsum(sizes) - sizes
    return np.asarray((ordered[starts + (sizes - 1) // 2] + ordered[starts + sizes // 2]) / 2)


def middle(differences: Array) -> float:
    """The estimate of Hodges and Lehmann: the median of the means of every two, and of each with itself."""
    if len(differences) > MOST_DIFFERENCES:
        starts = np.arange(MOST_DIFFERENCES) * len(differences) // MOST_DIFFERENCES
        differences = np.add.reduceat(differences, starts) / np.diff(starts, append=len(differences))
    sums = np.add.outer(differences, differences)[np.tri(len(differences), dtype=bool)]
    return float(np.median(sums, overwrite_input=True)) / 2
