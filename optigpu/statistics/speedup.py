"""How many times better one figure of a metric is than another, from stored summaries that are independent."""

from optigpu.statistics.estimates import difference
from optigpu.statistics.evidence import alone
from optigpu.statistics.intervals import Bounds, comparable, factor_bounds
from optigpu.statistics.stored import StoredSummary
from optigpu.vocabulary import Better


def speedup(baseline: StoredSummary, candidate: StoredSummary) -> tuple[float, Bounds | None] | None:
    """The ratio, above 1 where the candidate is better, with its 95% interval; None where a figure is not positive."""
    above, below = (candidate, baseline) if candidate.better is Better.HIGHER else (baseline, candidate)
    if min((*above.figures, *below.figures), default=0.0) <= 0 or above.value is None or below.value is None:
        return None
    ratio = above.value / below.value
    sides = [alone(each, as_ratio=True) for each in (above, below)]
    if sides[0] is None or sides[1] is None or not comparable(above.replicates or 1, below.replicates or 1):
        return ratio, None
    return ratio, factor_bounds(ratio, difference(sides[0], sides[1]))
