"""What a chart shows, as data: panels of marks. `optigpu charts` writes it as JSON beside the picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from optigpu.documents.result import Attribution
from optigpu.vocabulary import Better, Document, Frozen

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
