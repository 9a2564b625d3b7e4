"""The rows of a board as points: one figure over another, with a line through what no other row surpasses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optigpu.documents.views import Board, LeaderboardRow, Standing
from optigpu.report.charts.fronts import DIVERGENCE, with_front
from optigpu.report.charts.marks import Form, Interval, Mark, Panel
from optigpu.report.rows import heading
from optigpu.vocabulary import Better


@dataclass(frozen=True)
class Axis:
    """A figure of a row that a chart can show: its name with the unit, its value and its interval."""

    name: str
    value: Callable[[LeaderboardRow], float | None]
    ci: Callable[[LeaderboardRow], Interval | None] = lambda _: None
    better: Better = Better.LOWER
    logarithmic: bool = False


AXES = {
    "weights": Axis("weights (MB)", lambda row: _times(row.weight_bytes, 1e-6)),
    "memory": Axis("peak memory (MB)", lambda row: _times(row.peak_bytes, 1e-6)),
    "divergence": Axis(DIVERGENCE, lambda row: row.kld_mean, logarithmic=True),
    "agreement": Axis(
        "top-1 agreement with fp32 (%)", lambda row: _times(row.top1_agreement, 100.0), better=Better.HIGHER
    ),
    "energy": Axis("energy (J/token)", lambda row: row.j_per_token),
}
"""What speed, or each other, can be shown over."""


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def speed_axis(board: Board) -> Axis:
    """The metric that a board is ranked by."""
    return Axis(
        heading(board.metric), lambda row: row.value.value, lambda row: row.value.ci, better=board.better
    )


def front_panel(
    rows: Sequence[LeaderboardRow],
    x: Axis,
    y: Axis,
    series: Callable[[LeaderboardRow], str] = lambda row: row.backend,
) -> Panel:
    """A point for each row that has both figures. On the front is what no other ranked row surpasses in the two."""
    several = len({series(row) for row in rows}) > 1
    marks: list[Mark] = []
    missing: dict[str, str] = {}
    for row in rows:
        at, value = x.value(row), y.value(row)
        if at is None or value is None:
            missing[row.label] = f"{x.name} or {y.name} was not measured"
            continue
        mark = Mark(
            label=row.label,
            series=series(row) if several else "",
            x=at,
            x_ci=x.ci(row),
            value=value,
            ci=y.ci(row),
            valid=row.standing is not Standing.INVALID,
            source=row.result_id,
        )
        marks.append(mark)
    panel = Panel(
        title=f"{y.name} over {x.name}",
        form=Form.FRONT,
        axis=y.name,
        x_axis=x.name,
        better=y.better,
        x_better=x.better,
        logarithmic=x.logarithmic,
        marks=tuple(marks),
        missing=missing,
    )
    return with_front(panel, [row.result_id for row in rows if row.standing is Standing.CURRENT])
