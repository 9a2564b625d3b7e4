"""The samples of a metric in bins of one width, for each replicate."""

import math
from collections.abc import Sequence
from statistics import median

from optigpu.vocabulary import Frozen, SpecError

LEAST_BINS, MOST_BINS = 8, 40
BEYOND = 0.01
"""The share of the samples that may lie beyond the last bin, where they would make all bins wide."""
LEAST_SPAN = 1e-9
"""Samples that differ by less, relative to their size, are one."""
FAR = 2.0
"""They do where they are so many times as far from the median as the others reach."""


class Counted(Frozen):
    """The samples of one replicate: how many lie in each bin, and how many beyond the last."""

    label: str
    counts: tuple[int, ...]
    beyond: int
    n: int
    median: float


class Samples(Frozen):
    """`edges` bound the bins of all replicates, one more than there are bins; `axis` names what is counted."""

    title: str
    axis: str
    edges: tuple[float, ...]
    replicates: tuple[Counted, ...]


def samples_data(title: str, axis: str, samples: Sequence[Sequence[float]], scale: float = 1.0) -> Samples:
    """Of each replicate. Raises SpecError where there is no finite sample."""
    scaled = [[value * scale for value in each if math.isfinite(value * scale)] for each in samples]
    pooled = sorted(value for each in scaled for value in each)
    if not pooled:
        raise SpecError(f"{title}: there is no sample to count; measure again and keep the samples.")
    edges = _edges(pooled)
    replicates = (_counted(f"replicate {n}", each, edges) for n, each in enumerate(scaled, 1) if each)
    return Samples(title=title, axis=axis, edges=tuple(edges), replicates=tuple(replicates))


def _edges(pooled: Sequence[float]) -> list[float]:
    """As many bins as Freedman and Diaconis take (1981), from the least sample on. Few that lie far out are beyond."""
    low = pooled[0]
    kept = pooled[math.ceil((1 - BEYOND) * len(pooled)) - 1]
    quarter, half, three_quarters = (pooled[int(share * (len(pooled) - 1))] for share in (0.25, 0.5, 0.75))
    width = 2 * (three_quarters - quarter) / len(pooled) ** (1 / 3)
    high = next(value for value in reversed(pooled) if value <= kept or value - half <= FAR * (kept - low))
    span = high - low
    if span <= LEAST_SPAN * max(abs(high), abs(low), LEAST_SPAN):
        span = abs(high) * 0.01 or 1.0
    bins = max(LEAST_BINS, math.ceil(min(MOST_BINS, span / width))) if width > 0 else LEAST_BINS
    return [*(low + span * number / bins for number in range(bins)), max(high, low + span)]


def _counted(label: str, samples: Sequence[float], edges: Sequence[float]) -> Counted:
    low, width, bins = edges[0], (edges[-1] - edges[0]) / (len(edges) - 1), len(edges) - 1
    counts = [0] * bins
    beyond = 0
    for value in samples:
        if value > edges[-1]:
            beyond += 1
        else:
            counts[min(bins - 1, int((value - low) / width))] += 1
    return Counted(label=label, counts=tuple(counts), beyond=beyond, n=len(samples), median=median(samples))
