"""The table of a comparison of two results."""

import math
from collections.abc import Iterator

from optigpu.documents.views import ComparedResult, Comparison, Decision, MetricComparison
from optigpu.report.formats import Grid, columns
from optigpu.report.leaderboard import workload_text
from optigpu.report.numbers import MISSING, NOT_VALID, short
from optigpu.report.rows import HEADINGS

LONGEST_VALUE = 60


def comparison_grid(comparison: Comparison) -> Grid:
    """A line for each metric: both values, their ratio (or difference) with its interval, and the decision."""
    baseline, candidate = comparison.baseline, comparison.candidate
    return Grid(
        title=f"{candidate.label} against {baseline.label}: "
        f"{workload_text(candidate.workload, candidate.model)} on {candidate.hardware}",
        columns=columns("metric", "baseline:", "candidate:", "ratio [95% interval]:", "decision"),
        rows=tuple(_cells(name, metric, comparison) for name, metric in _measured(comparison).items()),
        notes=tuple(_notes(comparison)),
    )


def _measured(comparison: Comparison) -> dict[str, MetricComparison]:
    """The metrics that at least one side has a value of."""
    return {
        name: metric
        for name, metric in comparison.metrics.items()
        if metric.baseline is not None or metric.candidate is not None
    }


def _cells(name: str, metric: MetricComparison, comparison: Comparison) -> tuple[str, ...]:
    return (
        HEADINGS.get(name) or (name if metric.unit == "1" else f"{name} ({metric.unit})"),
        _figure(metric.baseline, comparison.baseline),
        _figure(metric.candidate, comparison.candidate),
        change_text(metric),
        f"different, {metric.decision}"
        if metric.decision in (Decision.BETTER, Decision.WORSE)
        else metric.decision or MISSING,
    )


def change_text(metric: MetricComparison) -> str:
    """For example "5.0x [4.6, 5.9]", or "+0.12 [0.05, 0.19]" for a difference."""
    ratio, difference, digits = metric.ratio, metric.difference, 2
    if metric.ci is not None:
        digits = _digits(metric.ci[1] - metric.ci[0])
    elif metric.exact and ratio is not None:  # what was counted is shown as finely as it differs from 1
        digits = _digits(abs(ratio - 1))
    interval = f" [{metric.ci[0]:.{digits}f}, {metric.ci[1]:.{digits}f}]" if metric.ci else ""
    if ratio is not None:
        return f"{ratio:.{digits}f}x{interval}"
    if difference is None:
        return MISSING
    return f"{difference:+.{digits}f}{interval}" if interval else f"{difference:+.3g}"


def _digits(width: float) -> int:
    """Digits behind the point that show two of so small a width."""
    return min(max(1 - math.floor(math.log10(width)), 0), 6) if width > 0 else 2


def _legend(comparison: Comparison, shown: dict[str, MetricComparison]) -> Iterator[str]:
    """What the decisions that occur mean."""
    found = {metric.decision for metric in shown.values() if not metric.exact}
    yield "ratio: candidate over baseline."
    if Decision.BETTER in found or Decision.WORSE in found:
        yield "different: the interval does not contain 1 (0 for a difference)."
    percent = f"{100 * comparison.margin:g}%"
    if Decision.EQUIVALENT in found:
        yield f"equivalent: the ratio's 90% interval lies within {percent} of 1."
    for name, metric in shown.items():
        if metric.decision is Decision.UNDECIDED and metric.reason is None and metric.ci:
            centre = "1" if metric.ratio is not None else "0"
            interval = change_text(metric).partition(" ")[2]
            wider = f" and reaches beyond {percent} of it" if metric.ratio is not None else ""
            yield f"{name}: undecided: the interval {interval} contains {centre}{wider}."


def _figure(value: float | None, side: ComparedResult) -> str:
    """A side's value, marked if its result is not valid."""
    return short(value) if side.valid or value is None else short(value) + NOT_VALID


def _notes(comparison: Comparison) -> Iterator[str]:
    yield from comparison.notes
    if not (comparison.baseline.valid and comparison.candidate.valid):
        yield "!: of a result that is not valid."
    shown = _measured(comparison)
    if shown:
        yield from _legend(comparison, shown)
    else:
        yield "The two results have no metric in common."
    reasons: dict[str, list[str]] = {}
    for name, metric in shown.items():
        if metric.reason:
            reasons.setdefault(metric.reason, []).append(name)
    for reason, names in reasons.items():
        yield f"{'all' if len(names) == len(shown) else ', '.join(names)}: {reason}"
    if unknown := comparison.metrics.keys() - shown.keys():
        yield f"measured on neither side: {', '.join(sorted(unknown))}"
    for difference in comparison.differences:
        before, after = _short(difference.baseline), _short(difference.candidate)
        yield f"differs: {difference.field}: {before} -> {after}"


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
