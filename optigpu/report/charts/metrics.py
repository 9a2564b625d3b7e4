"""Figures of a result, as the charts read them."""

from collections.abc import Callable, Sequence

from optigpu.report.canvas import is_valid
from optigpu.report.charts.marks import Form, Interval, Mark, Panel, Report
from optigpu.report.numbers import with_interval
from optigpu.vocabulary import Document, Role


def rungs_of(report: Report) -> list[Document]:
    """The baseline of a ladder and each prefix of its stack, of the first workload and model that it has a baseline of.

    The first prefix is the first technique alone, which the attribution knows by what it added; without an attribution
    it is taken to be the first that was measured alone. Empty without a baseline.
    """
    first = next((each for each in report.results if _role(each) is Role.BASELINE), None)
    if first is None:
        return []
    same = [each for each in report.results if _work(each) == _work(first)]
    alone = [each["variant"]["index"] for each in same if _role(each) is Role.ALONE]
    rows = report.attribution.rows if report.attribution else ()
    added = [row.index for row in rows if row.added is not None] if rows else alone[:1]
    return [
        each
        for each in same
        if _role(each) in (Role.BASELINE, Role.CUMULATIVE)
        or (_role(each) is Role.ALONE and each["variant"]["index"] in added)
    ]


def _role(result: Document) -> Role | None:
    """None for a role of another version."""
    role = result["variant"]["role"]
    return Role(role) if role in set(Role) else None


def _work(result: Document) -> tuple[str, str | None]:
    return result["variant"]["workload_digest"], result["variant"]["model"]


def primary_of(result: Document) -> Document:
    """The summary of the variant's primary metric."""
    metric: Document = result["metrics"][result["variant"]["primary_metric"]]
    return metric


def figure_of(result: Document, name: str) -> Document | None:
    """The summary of a metric that has a value; else None."""
    metric: Document | None = result["metrics"].get(name)
    return metric if metric and metric["value"] is not None else None


def reason_of(result: Document, name: str) -> str:
    """Why a result has no value of a metric."""
    metric = result["metrics"].get(name) or {}
    return metric.get("reason") or "not measured"


def first_measured(results: Sequence[Document], names: tuple[str, ...]) -> str | None:
    """The first of several metrics that any result has a value of."""
    return next((name for name in names if any(figure_of(each, name) for each in results)), None)


def interval_of(metric: Document, scale: float = 1.0) -> Interval | None:
    """The 95% interval in another unit."""
    return (metric["ci"][0] * scale, metric["ci"][1] * scale) if metric.get("ci") else None


def label_of(result: Document) -> str:
    """A variant's label; an invalid one says so."""
    label = str(result["variant"]["label"])
    return label if is_valid(result) else f"{label} (invalid)"


def bar_of(result: Document, metric: Document, scale: float, label: str, series: str = "") -> Mark:
    """A metric's value as a bar with its interval."""
    return Mark(
        label=label if is_valid(result) else f"{label} (invalid)",
        value=metric["value"] * scale,
        ci=interval_of(metric, scale),
        series=series,
        text=with_interval(metric, scale),
        valid=is_valid(result),
        source=str(result["id"]),
    )


def metric_panel(
    title: str,
    results: Sequence[Document],
    name: str,
    scale: float,
    unit: str,
    label: Callable[[Document], str] = lambda result: str(result["variant"]["label"]),
) -> Panel:
    """A bar for each result that has the metric; the others are named with the reason."""
    found = [(result, figure_of(result, name)) for result in results]
    return Panel(
        title=title,
        form=Form.BARS,
        axis=f"{name.removesuffix('_s').removesuffix('_bytes').replace('_', ' ')} ({unit})",
        marks=tuple(bar_of(result, metric, scale, label(result)) for result, metric in found if metric),
        missing={label(result): reason_of(result, name) for result, metric in found if not metric},
    )
