"""The table of a comparison of two results."""

from collections.abc import Iterator

from optigpu.documents.views import ComparedResult, Comparison, Difference, MetricComparison
from optigpu.report.formats import Column, Grid
from optigpu.report.leaderboard import workload_text
from optigpu.report.numbers import MISSING, short
from optigpu.report.rows import HEADINGS

LONGEST_VALUE = 60


def comparison_grid(comparison: Comparison) -> Grid:
    """A line for each metric: both values, their ratio with its interval, and the decision."""
    baseline, candidate = comparison.baseline, comparison.candidate
    return Grid(
        title=f"{candidate.label} against {baseline.label}: {_place(candidate)}",
        columns=(
            Column("metric"),
            Column("baseline", right=True),
            Column("candidate", right=True),
            Column("ratio", right=True),
            Column("95% interval", right=True),
            Column("decision"),
        ),
        rows=tuple(_cells(name, metric) for name, metric in _measured(comparison).items()),
        notes=tuple(_notes(comparison)),
    )


def _measured(comparison: Comparison) -> dict[str, MetricComparison]:
    """The metrics that at least one side has a value of."""
    return {
        name: metric
        for name, metric in comparison.metrics.items()
        if metric.baseline is not None or metric.candidate is not None
    }


def _place(result: ComparedResult) -> str:
    return f"{workload_text(result.workload, result.model)} on {result.hardware}"


def _cells(name: str, metric: MetricComparison) -> tuple[str, ...]:
    low, high = metric.ci or (None, None)
    return (
        HEADINGS.get(name) or (name if metric.unit == "1" else f"{name} ({metric.unit})"),
        short(metric.baseline),
        short(metric.candidate),
        MISSING if metric.ratio is None else f"{metric.ratio:.3f}",
        MISSING if low is None or high is None else f"[{low:.3f}, {high:.3f}]",
        metric.decision or MISSING,
    )


def _notes(comparison: Comparison) -> Iterator[str]:
    yield from comparison.notes
    shown = _measured(comparison)
    if shown:
        percent = f"{100 * comparison.margin:g}%"
        yield (
            f"ratio: candidate over baseline. equivalent: its interval lies within {percent} of 1. "
            "undecided: its interval contains 1."
        )
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
        yield _difference(difference)


def _difference(difference: Difference) -> str:
    return f"differs: {difference.field}: {_short(difference.baseline)} -> {_short(difference.candidate)}"


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
