"""What a chart shows, as data, and how it is read of results. `optigpu charts` writes it as JSON beside the picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from optigpu.documents.result import Attribution
from optigpu.report.numbers import with_interval
from optigpu.vocabulary import Better, Document, Frozen, Role

Interval = tuple[float, float]


@dataclass(frozen=True)
class Report:
    """What a chart is drawn from: results as JSON, and the attribution of their job; None for those of several jobs."""

    title: str
    results: Sequence[Document]
    attribution: Attribution | None = None


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


class Table(Frozen):
    """Cells as text, the headings first; a cell without a figure is "-"."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Box(Frozen):
    """A box of a diagram: a heading and lines, on a level from the top."""

    heading: str
    lines: tuple[str, ...]
    level: int


class ChartData(Frozen):
    """Everything that a chart shows."""

    title: str
    panels: tuple[Panel, ...] = ()
    table: Table | None = None
    boxes: tuple[Box, ...] = ()
    note: str = ""
    origin: str | None = None


GOAL_PERCENT = 0.1
"""The quality loss that the project's founding goal allows, in percent."""
LOSSES = {
    "accuracy_loss_percent": "accuracy lost against fp32 (%)",
    "top1_agreement": "positions whose most likely token is not fp32's (%)",
}
"""The metrics of quality loss, the preferred one first, with the label of the axis."""


def is_valid(result: Document) -> bool:
    return bool(result["verdict"]["valid"])


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


def loss_of(result: Document, name: str) -> tuple[float, Interval | None] | None:
    """Loss of quality in percent with its interval; None if it was not measured."""
    metric = figure_of(result, name)
    if metric is None or name == "accuracy_loss_percent":
        return (metric["value"], interval_of(metric)) if metric else None
    flipped = (100 * (1 - metric["ci"][1]), 100 * (1 - metric["ci"][0])) if metric.get("ci") else None
    return 100 * (1 - metric["value"]), flipped


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
