"""A variant over time, with its intervals and the changes of its level."""

from datetime import datetime

from optigpu.documents.views import History, HistoryPoint, LevelChange
from optigpu.report.charts.marks import Interval
from optigpu.report.rows import heading
from optigpu.vocabulary import Better, Frozen

MOST_VERSIONS = 3
"""Packages that a change names."""


class Moment(Frozen):
    """One result."""

    at: datetime
    value: float
    ci: Interval | None = None
    source: str
    warnings: tuple[str, ...] = ()


class Change(Frozen):
    """Where the level changes: `text` says by how much, and what changed with it."""

    at: datetime
    text: str
    improved: bool
    source: str


class Timeline(Frozen):
    """Results, the oldest first."""

    title: str
    axis: str
    better: Better
    moments: tuple[Moment, ...]
    changes: tuple[Change, ...] = ()


def history_data(history: History) -> Timeline:
    """Of a history with its changes, as `optigpu.statistics.levels.with_changes` finds them."""
    return Timeline(
        title=f"{history.label} on {history.hardware}",
        axis=heading(history.metric),
        better=history.better,
        moments=tuple(map(_moment, history.points)),
        changes=tuple(map(_change, history.changes)),
    )


def _moment(point: HistoryPoint) -> Moment:
    return Moment(
        at=point.measured_at,
        value=point.value,
        ci=point.ci,
        source=point.result_id,
        warnings=point.warnings,
    )


def _change(change: LevelChange) -> Change:
    """`12.1% higher (worse): torch 2.12 → 2.13`."""
    size = f"{abs(change.ratio - 1):.1%} {'higher' if change.ratio > 1 else 'lower'}"
    pairs = list(change.versions.items())
    named = [f"{name} {old or 'none'} → {new or 'none'}" for name, (old, new) in pairs[:MOST_VERSIONS]]
    more = [f"{len(pairs) - MOST_VERSIONS} more versions"] if len(pairs) > MOST_VERSIONS else []
    what = ", ".join(named + more) or "no version changed"
    return Change(
        at=change.measured_at,
        text=f"{size} ({'better' if change.improved else 'worse'}): {what}",
        improved=change.improved,
        source=change.result_id,
    )
