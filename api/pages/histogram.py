"""Raw samples as histograms, one for each process, on one axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.documents.result import Samples
from optigpu.report.numbers import short
from optigpu.statistics.stored import StoredSummary

BINS = 48
MOST_REPLICATES = 12


@dataclass(frozen=True)
class Strip:
    """One process: the height of each bin in percent of the highest, and where its median is, in percent."""

    heights: tuple[float, ...]
    median: float
    words: str


@dataclass(frozen=True)
class Histogram:
    """The strips of a metric between the ends of their axis; `left_out` processes have no strip."""

    strips: tuple[Strip, ...]
    low: str
    high: str
    left_out: int


def histogram(samples: Samples, summary: StoredSummary) -> Histogram | None:
    """None where there are too few samples for one, or no finite ones."""
    replicates = [[value for value in each if math.isfinite(value)] for each in samples]
    every = sorted(value for each in replicates for value in each)
    if len(every) < 2 or every[0] == every[-1]:
        return None
    low, high = every[0], every[-1]
    shown = [each for each in replicates if each][:MOST_REPLICATES]
    return Histogram(
        strips=tuple(_strip(each, low, high, summary.unit) for each in shown),
        low=short(low),
        high=short(high),
        left_out=len(replicates) - len(shown),
    )


def _strip(values: Sequence[float], low: float, high: float, unit: str) -> Strip:
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int(BINS * (value - low) / (high - low)))] += 1
    middle = sorted(values)[len(values) // 2]
    return Strip(
        heights=tuple(round(100 * count / max(counts), 1) for count in counts),
        median=round(100 * (middle - low) / (high - low), 2),
        words=f"{len(values)} samples, median {short(middle)} {unit}",
    )
