"""How many times one process's figure is another's, from turns that followed each other.

What slows a machine down for longer than a turn slows both of a pair of turns down, so that the difference of their
logarithms does not show it. The pairs in whose midst the machine changed are far off, to either side. The median of the
means of two differences hardly moves for them, and is nearly as precise as the mean where there are none.

Hodges and Lehmann, Estimates of Location Based on Rank Tests, 1963.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.rounds import RoundRecord
from optigpu.statistics.student import Array

MOST_DIFFERENCES = 2000
"""Of more differences the means of so many runs of neighbours are taken first: every two grow with the square."""

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Timed:
    """A process's rounds, and its samples of one metric: one for each request."""

    records: Sequence[RoundRecord]
    samples: Sequence[float]


def ratio_of_turns(ours: Timed, theirs: Timed) -> float | None:
    """How many times theirs our figure is.

    None where no round that is counted on both sides had turns on both, or where one of their samples is not positive.
    """
    shared = [
        number
        for number, both in enumerate(zip(ours.records, theirs.records, strict=False))
        if all(record.counted and record.turns for record in both)
    ]
    if not shared:
        return None
    samples = [_samples_of(side, shared) for side in (ours, theirs)]
    if min(float(each.min()) for each in samples) <= 0:
        return None
    turns = [[side.records[number].turns for number in shared] for side in (ours, theirs)]
    counts = [min(map(len, both)) for both in zip(*turns, strict=True)]
    sizes = [np.concatenate(list(map(_sizes, side, counts))) for side in turns]
    above, below = map(_medians, samples, sizes)
    return math.exp(_middle(np.log(above) - np.log(below)))


def _samples_of(side: Timed, rounds: Sequence[int]) -> Array:
    """Those of some of the rounds."""
    ends = list(accumulate(record.requests for record in side.records))
    parts = [side.samples[ends[each] - side.records[each].requests : ends[each]] for each in rounds]
    return np.concatenate(parts, dtype=np.float64)


def _sizes(turns: Sequence[int], count: int) -> Counts:
    """How many requests each of `count` groups of neighbouring turns has, of nearly as many turns each."""
    groups = (2 * np.arange(len(turns)) + 1) * count // (2 * len(turns))
    return np.bincount(groups, weights=turns, minlength=count).astype(np.int64)


def _medians(values: Array, sizes: Counts) -> Array:
    """The median of each of the groups of so many values that follow each other."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    ordered = values[np.lexsort((values, groups))]
    starts = np.cumsum(sizes) - sizes
    return np.asarray((ordered[starts + (sizes - 1) // 2] + ordered[starts + sizes // 2]) / 2)


def _middle(differences: Array) -> float:
    """The estimate of Hodges and Lehmann: the median of the means of every two, and of each with itself."""
    if len(differences) > MOST_DIFFERENCES:
        starts = np.arange(MOST_DIFFERENCES) * len(differences) // MOST_DIFFERENCES
        differences = np.add.reduceat(differences, starts) / np.diff(starts, append=len(differences))
    sums = np.add.outer(differences, differences)[np.tri(len(differences), dtype=bool)]
    return float(np.median(sums, overwrite_input=True)) / 2
