"""What a chart shows, as data, how it is read of results, and as a table, for who does not see the chart or wants its
figures. `optigpu charts` writes the data as JSON beside the picture."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median

from pydantic import Field

from optigpu.documents.result import Attribution, AttributionRow
from optigpu.documents.timeline import Span
from optigpu.documents.views import History, LevelChange
from optigpu.report.formats import Column, Grid, tabulated
from optigpu.report.numbers import short, with_interval
from optigpu.report.rows import heading, origin_line
from optigpu.vocabulary import Better, Document, Frozen, SpecError

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
    # As many bins as Freedman and Diaconis take (1981), from the least sample on; few far ones are beyond.
    low = pooled[0]
    kept = pooled[math.ceil((1 - BEYOND) * len(pooled)) - 1]
    quarter, half, three_quarters = (pooled[int(share * (len(pooled) - 1))] for share in (0.25, 0.5, 0.75))
    width = 2 * (three_quarters - quarter) / len(pooled) ** (1 / 3)
    high = next(value for value in reversed(pooled) if value <= kept or value - half <= FAR * (kept - low))
    span = high - low
    if span <= LEAST_SPAN * max(abs(high), abs(low), LEAST_SPAN):
        span = abs(high) * 0.01 or 1.0
    bins = max(LEAST_BINS, math.ceil(min(MOST_BINS, span / width))) if width > 0 else LEAST_BINS
    edges = [*(low + span * number / bins for number in range(bins)), max(high, low + span)]
    replicates = (_counted(f"replicate {n}", each, edges) for n, each in enumerate(scaled, 1) if each)
    return Samples(title=title, axis=axis, edges=tuple(edges), replicates=tuple(replicates))


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


MOST_VERSIONS = 3
"""Packages that a change names."""


def panel_table(panel: Panel) -> Grid:
    """A row for each mark, and a note for each label that has none. Columns that are empty are left out."""
    columns: list[tuple[str, bool, Callable[[Mark], str]]] = [
        ("rank", True, lambda each: "" if each.rank is None else str(each.rank)),
        ("name", False, lambda each: each.label),
        ("series", False, lambda each: each.series if each.series != each.label else ""),
        ("point", False, lambda each: each.text if panel.x_axis and each.text != each.label else ""),
        ("from", True, lambda each: short(each.start) if each.start else ""),
        (panel.axis, True, lambda each: short(each.value)),
        ("95% interval", True, lambda each: interval(each.ci)),
        ("its roof", True, lambda each: "" if each.limit is None else short(each.limit)),
        (panel.x_axis, True, lambda each: short(each.x) if panel.x_axis else ""),
        ("its 95% interval", True, lambda each: interval(each.x_ci) if panel.x_axis else ""),
        ("on the front", False, lambda each: "yes" if each.on_front else ""),
        ("status", False, lambda each: "claimed" if each.claimed else "" if each.valid else "not valid"),
    ]
    notes = (*(f"{each.text}." for each in panel.roofs), *reasons(panel.missing))
    headings = tuple(Column(words, right) for words, right, _ in columns)
    rows = tuple(tuple(cell(each) for *_, cell in columns) for each in panel.marks)
    faint = frozenset(number for number, each in enumerate(panel.marks) if not each.valid)
    return Grid(panel.title, headings, rows, notes, faint).without_empty_columns()


def history_table(history: History) -> Grid:
    """A row for each result, the newest first; a change of the level is written beside the first result after it."""
    changes = {each.result_id: change_text(each) for each in history.changes}
    grid = tabulated(
        history_title(history),
        history.points[::-1],
        {
            "measured (UTC)": lambda each: f"{each.measured_at:%Y-%m-%d %H:%M}",
            f"{heading(history.metric)}:": lambda each: short(each.value),
            "95% interval:": lambda each: interval(each.ci),
            "change": lambda each: changes.get(each.result_id, ""),
            "warnings": lambda each: ", ".join(each.warnings),
        },
    )
    return grid.without_empty_columns()


def history_title(history: History) -> str:
    return f"{history.label} on {history.hardware}"


def change_text(change: LevelChange) -> str:
    """`12.1% higher (worse): torch 2.12 → 2.13`."""
    size = f"{abs(change.ratio - 1):.1%} {'higher' if change.ratio > 1 else 'lower'}"
    named = [f"{name} {old or 'none'} → {new or 'none'}" for name, (old, new) in change.versions.items()]
    more = len(named) - MOST_VERSIONS
    what = ", ".join(named[:MOST_VERSIONS] + ([f"{more} more versions"] if more > 0 else []))
    return f"{size} ({'better' if change.improved else 'worse'}): {what or 'no version changed'}"


def samples_table(samples: Samples) -> Grid:
    """A row for each bin: how many samples of each replicate lie in it."""
    columns = (
        Column(samples.axis),
        *(Column(f"{each.label}, median {short(each.median)}", right=True) for each in samples.replicates),
    )
    bins = tuple(
        (f"{short(low)} to {short(high)}", *(str(each.counts[place]) for each in samples.replicates))
        for place, (low, high) in enumerate(pairwise(samples.edges))
    )
    beyond = (f"above {short(samples.edges[-1])}", *(str(each.beyond) for each in samples.replicates))
    return Grid(samples.title, columns, (*bins, beyond))


def interval(ci: Interval | None) -> str:
    return "" if ci is None else f"[{short(ci[0])}, {short(ci[1])}]"


def reasons(missing: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{label}: {reason}" for label, reason in missing.items())
