"""What a chart shows, as data, how it is read of results, and as a table, for who does not see the chart or wants its
figures. `optigpu charts` writes the data as JSON beside the picture."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from optigpu.documents.events import Span
from optigpu.documents.result import Attribution, AttributionRow
from optigpu.report.formats import with_interval
from optigpu.report.rows import origin_line
from optigpu.vocabulary import Better, Document, Frozen

Interval = tuple[float, float]


@dataclass(frozen=True)
class Report:
    """What a chart is drawn from: results as JSON, the attribution of their job, and where its time went; nothing of
    both for results of several jobs."""

    title: str
    results: Sequence[Document]
    attribution: Attribution | None = None
    timeline: Sequence[Span] = ()

    @property
    def rows(self) -> tuple[AttributionRow, ...]:
        """What the attribution says of each variant."""
        return self.attribution.rows if self.attribution else ()

    @property
    def measured(self) -> list[Document]:
        """The results that have a value of their primary metric."""
        return [each for each in self.results if primary_of(each)["value"] is not None]


class Mark(Frozen):
    """One bar or point. `value` and `ci` are in the unit of the panel's own axis, `x` and `x_ci` in that of the other.

    `series` is the line or group that it belongs to, `start` where a bar begins, `text` what stands beside it.
    `claimed` marks a published figure, which was not measured. `on_front` is said of what no other mark of its panel
    surpasses. `rank` is its place on a board, which ties share; `limit` what its roof allows, on the values' axis.
    `source` is the id of the result or of the claim.
    """

    label: str
    value: float
    ci: Interval | None = None
    x: float | None = None
    x_ci: Interval | None = None
    start: float = 0.0
    series: str = ""
    text: str = ""
    valid: bool = True
    claimed: bool = False
    on_front: bool = False
    rank: int | None = None
    limit: float | None = None
    source: str | None = None


class Roof(Frozen):
    """What a machine can do at most: GB/s of its memory, or GFLOP/s of a dtype; the other one is null."""

    text: str
    gb_per_s: float | None = None
    gflop_per_s: float | None = None


class Form(StrEnum):
    """How the marks of a panel are drawn."""

    BARS = "bars"
    LINES = "lines"
    LOSS = "loss"
    FRONT = "front"
    ROOFLINE = "roofline"


class Panel(Frozen):
    """Marks on one pair of axes. `axis` names the values' axis and its unit, `x_axis` the other; bars have none.

    `logarithmic` says how their x axis is, `logarithmic_values` how the other one of a front is. `better` and
    `x_better` say which way is better on them. A roofline alone has `roofs`. `missing` says what is not shown, each
    label with its reason.
    """

    title: str
    form: Form
    axis: str
    x_axis: str = ""
    logarithmic: bool = False
    logarithmic_values: bool = False
    better: Better = Better.HIGHER
    x_better: Better = Better.LOWER
    marks: tuple[Mark, ...] = ()
    roofs: tuple[Roof, ...] = ()
    missing: dict[str, str] = Field(default_factory=dict)


class ChartData(Frozen):
    """Everything that a chart shows."""

    title: str
    panels: tuple[Panel, ...] = ()
    note: str = ""
    origin: str | None = None


GOAL_PERCENT = 0.1
"""The quality loss that the project's founding goal allows, in percent."""
LOSSES = {
    "accuracy_loss_percent": "accuracy lost against fp32 (%)",
    "top1_agreement": "positions whose most likely token is not fp32's (%)",
}
"""The metrics of quality loss, the preferred one first, with the label of the axis."""
Estimate = tuple[float, Interval | None]
"""A value with its 95% interval."""


def is_valid(result: Document) -> bool:
    return bool(result["verdict"]["valid"])


def primary_of(result: Document) -> Document:
    """The summary of the variant's primary metric; one without a value where the result has none."""
    metric: Document = result["metrics"].get(result["variant"]["primary_metric"]) or {"value": None}
    return metric


def figure_of(result: Document, name: str) -> Document | None:
    """The summary of a metric that has a value; else None."""
    metric: Document | None = result["metrics"].get(name)
    return metric if metric and metric["value"] is not None else None


def reason_of(result: Document, name: str) -> str:
    """Why a result has no value of a metric."""
    metric = result["metrics"].get(name) or {}
    return metric.get("reason") or "not measured"


def missing_of(results: Sequence[Document], name: str) -> dict[str, str]:
    """The label of each result that has no value of a metric, with the reason."""
    return {label_of(each): reason_of(each, name) for each in results if not figure_of(each, name)}


def first_measured(results: Sequence[Document], names: Iterable[str]) -> str | None:
    """The first of several metrics that any result has a value of."""
    return next((name for name in names if any(figure_of(each, name) for each in results)), None)


def estimate(metric: Document, scale: float = 1.0) -> Estimate:
    """The value of a summary in another unit."""
    ci = metric.get("ci")
    return metric["value"] * scale, (ci[0] * scale, ci[1] * scale) if ci else None


def loss_of(result: Document, name: str | None) -> Estimate | None:
    """Loss of quality in percent; None if it was not measured."""
    metric = figure_of(result, name) if name else None
    if metric is None or name == "accuracy_loss_percent":
        return estimate(metric) if metric else None
    ci = metric.get("ci")
    return 100 * (1 - metric["value"]), (100 * (1 - ci[1]), 100 * (1 - ci[0])) if ci else None


def label_of(result: Document, label: str = "") -> str:
    """A variant's label, or another one for it; an invalid one says so."""
    label = label or str(result["variant"]["label"])
    return label if is_valid(result) else f"{label} (invalid)"


def mark_of(
    result: Document,
    y: Estimate,
    x: Estimate | None = None,
    *,
    label: str = "",
    series: str = "",
    text: str = "",
    limit: float | None = None,
) -> Mark:
    """A result as a bar or a point; `y` and `x` are in the units of the axes."""
    (value, ci), (at, x_ci) = y, x or (None, None)
    return Mark(
        label=label_of(result, label),
        value=value,
        ci=ci,
        x=at,
        x_ci=x_ci,
        series=series,
        text=text,
        valid=is_valid(result),
        limit=limit,
        source=str(result["id"]),
    )


def bar_of(result: Document, metric: Document, scale: float = 1.0, label: str = "", series: str = "") -> Mark:
    """A metric's value as a bar with its interval."""
    text = with_interval(metric, scale)
    return mark_of(result, estimate(metric, scale), label=label, series=series, text=text)


def of_panels(report: Report, results: Sequence[Document], *panels: Panel, note: str = "") -> ChartData:
    """A chart of panels that show these results of the report."""
    return ChartData(title=report.title, panels=panels, note=note, origin=origin_line(results))


def reasons(missing: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{label}: {reason}" for label, reason in missing.items())
