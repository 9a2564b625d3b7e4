"""The order of a board's rows, their ranks, and the cursor that continues both on the next page.

Order: current results, then earlier ones, then invalid ones. Within each: rows whose metric has a 95% interval, then
rows without one; within those the metric's value, best first, and equal values by result id.

Ranks: only current results have one. A row shares the rank of the row before it if its interval touches the interval
of the first row of that rank; else its rank is its position (1, 1, 3). Rows are compared with the first row of a rank
only, so that a chain of overlaps does not put everything on one rank. Rows without an interval share one rank, below
all others: their precision is unknown, so they outrank no row. What is counted (COUNTED_METRICS, such as
`weight_bytes`) is exact without one. A cursor holds that first row's interval, so ranks continue across pages.
"""

from collections.abc import Iterable
from types import NoneType
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, SQLColumnExpression, and_, case, or_

from optigpu.documents.views import Standing
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.store.tables import LeaderboardEntry, MetricRow
from optigpu.vocabulary import Better

_GROUPS = {standing: number for number, standing in enumerate(Standing)}
_GROUP = case(*((LeaderboardEntry.standing == each, number) for each, number in _GROUPS.items()))
_NUMBER = (int, float)
_MAYBE = (*_NUMBER, NoneType)
_KINDS = (str, int, _NUMBER, str, int, (int, NoneType), _MAYBE, _MAYBE)


class Figure(NamedTuple):
    """What orders a row: its standing, the metric's value and interval, and the result's id."""

    standing: Standing
    value: float
    low: float | None
    high: float | None
    result_id: str


class Place(NamedTuple):
    """The place of a row of a board: its position, and its rank with the interval of the rank's first row."""

    workload_digest: str
    group: int
    value: float
    result_id: str
    position: int
    rank: int | None
    low: float | None
    high: float | None

    def has_rank_of(self, figure: Figure) -> bool:
        """Whether the next row shares the rank."""
        if figure.low is None or figure.high is None or self.low is None or self.high is None:
            return figure.low is None and self.low is None
        return figure.low <= self.high and self.low <= figure.high

    def cursor(self) -> str:
        """The cursor of the rows that follow."""
        return encode_cursor(*self)


def place_of(cursor: str) -> Place:
    """The place that a cursor continues from. Raises CursorError."""
    return Place(*decode_cursor(cursor, *_KINDS))


def places(workload_digest: str, figures: Iterable[Figure], place: Place | None) -> list[Place]:
    """The place of each row, in order, given the place where the page before ended."""
    found = []
    for figure in figures:
        place = _next(workload_digest, figure, place)
        found.append(place)
    return found


def order(better: Better) -> tuple[SQLColumnExpression[Any], ...]:
    """The order of entries that are joined with their metric."""
    value = MetricRow.value.desc() if better is Better.HIGHER else MetricRow.value
    return _GROUP, MetricRow.low.is_(None), value, LeaderboardEntry.result_id


def follows(place: Place, better: Better) -> ColumnElement[bool]:
    """The row comes after that place in the order."""
    worse = MetricRow.value < place.value if better is Better.HIGHER else MetricRow.value > place.value
    tied = and_(MetricRow.value == place.value, LeaderboardEntry.result_id > place.result_id)
    unsure = MetricRow.low.is_(None)
    within = and_(unsure, or_(worse, tied)) if place.low is None else or_(unsure, worse, tied)
    return or_(place.group < _GROUP, and_(_GROUP.in_((place.group,)), within))


def _next(workload_digest: str, figure: Figure, before: Place | None) -> Place:
    position = before.position + 1 if before else 1
    rank, low, high = position, figure.low, figure.high
    if before is not None and before.rank is not None and before.has_rank_of(figure):
        rank, low, high = before.rank, before.low, before.high
    return Place(
        workload_digest=workload_digest,
        group=_GROUPS[figure.standing],
        value=figure.value,
        result_id=figure.result_id,
        position=position,
        rank=rank if figure.standing is Standing.CURRENT else None,
        low=low,
        high=high,
    )
