"""What two stored results say of one metric together: an estimate of the ratio's logarithm, or of the difference."""

from dataclasses import dataclass, replace

import numpy as np

from optigpu.statistics.estimates import (
    Array,
    Estimate,
    difference,
    difference_of_parts,
    mean_of,
    ratio_of_parts,
    t_quantile,
)
from optigpu.statistics.intervals import Bounds, comparable, factor_bounds
from optigpu.statistics.stored import StoredResult, StoredSummary
from optigpu.vocabulary import Better

_KNOWN_WELL = 1000.0
"""Degrees of freedom of an interval that does not say its own."""


@dataclass(frozen=True)
class Evidence:
    """An estimate, whether it is over pairs, and how many sides are single processes, which say nothing of others.

    `ratio` is that of the turns, where the estimate comes from these and not from the two values.
    """

    estimate: Estimate
    ratio: float | None = None
    paired: bool = False
    single_sides: int = 0


def evidence_of(
    name: str, baseline: StoredResult, candidate: StoredResult, *, as_ratio: bool
) -> Evidence | None:
    """Candidate against baseline: the logarithm of their ratio, or their difference; None without an interval."""
    ours, theirs = baseline.metrics[name], candidate.metrics[name]
    parts = baseline.without_part(name), candidate.without_part(name)
    if parts[0] and len(parts[0]) == len(parts[1]):
        return Evidence(_over_parts(ours, theirs, parts, as_ratio), paired=True)
    factors = candidate.factors_over(name, baseline) if as_ratio else ()
    if len(factors) > 1:
        return _over_turns(factors)
    sides = [_scaled(summary.per_replicate, as_ratio) for summary in (ours, theirs)]
    if baseline.was_beside(candidate) and len(sides[0]) == len(sides[1]) > 1:
        return Evidence(mean_of(sides[1] - sides[0]), paired=True)
    found = [alone(summary, as_ratio) for summary in (ours, theirs)]
    if found[0] is None or found[1] is None or not comparable(ours.replicates or 1, theirs.replicates or 1):
        return None
    single = 0 if any(parts) else sum(summary.replicates < 2 for summary in (ours, theirs))
    independent = difference(found[1], found[0])
    if not factors:
        return Evidence(independent, single_sides=single)
    # Turns say what the ratio is, and a single pair of processes not how far it is from that of others.
    around = replace(independent, centre=np.log(factors[0]))
    return Evidence(around, ratio=factors[0], single_sides=single)


def _over_turns(factors: tuple[float, ...]) -> Evidence:
    logarithm = mean_of(np.log(factors))
    return Evidence(logarithm, ratio=float(np.exp(logarithm.centre)), paired=True)


def _over_parts(
    ours: StoredSummary,
    theirs: StoredSummary,
    parts: tuple[tuple[float, ...], tuple[float, ...]],
    as_ratio: bool,
) -> Estimate:
    assert ours.value is not None
    assert theirs.value is not None
    if as_ratio:
        return ratio_of_parts(theirs.value / ours.value, parts[1], parts[0])
    return difference_of_parts(theirs.value - ours.value, parts[1], parts[0])


def alone(summary: StoredSummary, as_ratio: bool) -> Estimate | None:
    """One side by itself: from its processes, or from its interval; it reaches to where it would be undisturbed."""
    if summary.value is None or summary.cost_bound is None:
        return None
    found = _measured(summary, as_ratio)
    if found is None or summary.cost_bound == 0:
        return found
    undisturbed, measured = _scaled((summary.value * summary.disturbance, summary.value), as_ratio)
    return replace(
        found,
        below=float(max(0.0, measured - undisturbed)),
        above=float(max(0.0, undisturbed - measured)),
    )


def _measured(summary: StoredSummary, as_ratio: bool) -> Estimate | None:
    """As it was measured, disturbed or not."""
    if len(summary.per_replicate) > 1:
        return mean_of(_scaled(summary.per_replicate, as_ratio))
    bounds = summary.measured_ci
    if bounds is None or summary.value is None or (as_ratio and bounds[0] <= 0):
        return None
    low, high = _scaled(bounds, as_ratio)
    freedom = summary.freedom or _KNOWN_WELL
    error = (high - low) / 2 / t_quantile(0.975, freedom)
    centre = _scaled((summary.value,), as_ratio)[0]
    return Estimate(np.asarray(centre), np.asarray(error), np.asarray(freedom))


def _scaled(figures: tuple[float, ...], as_ratio: bool) -> Array:
    return np.log(figures) if as_ratio else np.asarray(figures, dtype=np.float64)


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
