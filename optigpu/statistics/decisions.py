"""What an interval decides: different, equivalent, or nothing.

Two results are equivalent if two one-sided tests at 5% say that their ratio is within the margin (Schuirmann, A
Comparison of the Two One-Sided Tests Procedure and the Power Approach, 1987), that is, if the 90% interval is; else
different if the 95% interval leaves 1 out; else nothing is decided.
"""

import math
from dataclasses import replace

import numpy as np

from optigpu.documents.views import Decision
from optigpu.statistics.estimates import Estimate
from optigpu.vocabulary import Better

MARGIN = 0.03
"""Ratios between 1 / 1.03 and 1.03 count as equivalent."""
PROCESSES_DIFFER = 0.05
"""A single process is taken to differ from others of its variant by 5% (one standard deviation).

Measured are 2% (docs/results/repeatability.json); what is different with 5% is so with less.
"""


def decide_ratio(logarithm: Estimate, better: Better, *, single_sides: int = 0) -> Decision:
    """The decision from a ratio's logarithm. Single processes can show a difference and no equivalence."""
    if single_sides == 0 and _within_margin(logarithm):
        return Decision.EQUIVALENT
    return decide_difference(_among_others(logarithm, single_sides), better)


def decide_difference(estimate: Estimate, better: Better) -> Decision:
    """Better or worse if the 95% interval leaves 0 out."""
    low, high = map(float, estimate.bounds())
    if low <= 0 <= high:
        return Decision.EQUAL if low == high else Decision.UNDECIDED
    return direction(low, better)


def decide_exactly(baseline: float, candidate: float, better: Better) -> Decision:
    """The decision between two figures that are counted and not measured."""
    return Decision.EQUAL if baseline == candidate else direction(candidate - baseline, better)


def direction(change: float, better: Better) -> Decision:
    """Whether a rise or a fall is an improvement."""
    return Decision.BETTER if (change > 0) == (better is Better.HIGHER) else Decision.WORSE


def _within_margin(logarithm: Estimate) -> bool:
    low, high = map(float, logarithm.bounds(0.90))
    return low >= -math.log1p(MARGIN) and high <= math.log1p(MARGIN)


def _among_others(logarithm: Estimate, single_sides: int) -> Estimate:
    """With the variation between processes that a side of one process does not show."""
    if single_sides == 0:
        return logarithm
    own, others = logarithm.error**2, single_sides * PROCESSES_DIFFER**2
    # The variation between processes is taken as known: only its own part has few degrees of freedom.
    freedom = logarithm.freedom * ((own + others) / np.maximum(own, 1e-12)) ** 2
    return replace(logarithm, error=np.sqrt(own + others), freedom=freedom)
