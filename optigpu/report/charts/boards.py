"""A board as charts: the figures of its rows as bars, and one of their figures over another with the front."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optigpu.documents.views import Board, LeaderboardRow, Standing
from optigpu.report.charts.marks import Form, Interval, Mark, Panel
from optigpu.report.rows import heading
from optigpu.statistics.front import Bounds, unsurpassed
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
    "divergence": Axis("mean divergence from fp32 (nat)", lambda row: row.kld_mean, logarithmic=True),
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
    shown = [(row, x.value(row), y.value(row)) for row in rows]
    found = [(row, at, value) for row, at, value in shown if at is not None and value is not None]
    ranked = [row for row, _, _ in found if row.standing is Standing.CURRENT]
    best = {
        ranked[number].result_id
        for number in unsurpassed([(_bounds(x, row), _bounds(y, row)) for row in ranked])
    }
    several = len({series(row) for row in rows}) > 1
    return Panel(
        title=f"{y.name} over {x.name}",
        form=Form.FRONT,
        axis=y.name,
        x_axis=x.name,
        better=y.better,
        x_better=x.better,
        logarithmic=x.logarithmic,
        marks=tuple(
            Mark(
                label=row.label,
                series=series(row) if several else "",
                x=at,
                x_ci=x.ci(row),
                value=value,
                ci=y.ci(row),
                valid=row.standing is not Standing.INVALID,
                on_front=row.result_id in best,
                source=row.result_id,
            )
            for row, at, value in found
        ),
        missing={
            row.label: f"{x.name} or {y.name} was not measured"
            for row, at, value in shown
            if at is None or value is None
        },
    )


def _bounds(axis: Axis, row: LeaderboardRow) -> Bounds:
    """More is better."""
    value = axis.value(row) or 0.0
    low, high = axis.ci(row) or (value, value)
    return (low, high) if axis.better is Better.HIGHER else (-high, -low)
