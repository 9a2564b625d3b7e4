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
from typing import NamedTuple

from optigpu.documents.views import Standing
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.vocabulary import Better

GROUPS = {standing: number for number, standing in enumerate(Standing)}
"""The number of each standing in the order."""
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


def parameters(place: Place, better: Better) -> dict[str, bool | float | str]:
    """Where in the order of its standing a place is, for the rows that follow it."""
    at = -place.value if better is Better.HIGHER else place.value
    return {"unsure": place.low is None, "place": at, "result_id": place.result_id}


def _next(workload_digest: str, figure: Figure, before: Place | None) -> Place:
    position = before.position + 1 if before else 1
    rank, low, high = position, figure.low, figure.high
    if before is not None and before.rank is not None and before.has_rank_of(figure):
        rank, low, high = before.rank, before.low, before.high
    return Place(
        workload_digest=workload_digest,
        group=GROUPS[figure.standing],
        value=figure.value,
        result_id=figure.result_id,
        position=position,
        rank=rank if figure.standing is Standing.CURRENT else None,
        low=low,
        high=high,
    )
