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

from sqlalchemy import Row

from optigpu.documents.views import Standing
from optigpu.store.cursors import decode_cursor, encode_cursor

GROUPS = {standing: number for number, standing in enumerate(Standing)}
"""The number of each standing in the order."""
_NUMBER = (int, float)
_MAYBE = (*_NUMBER, NoneType)
_KINDS = (str, int, _NUMBER, str, int, (int, NoneType), _MAYBE, _MAYBE)


Found = Row[*tuple[Any, ...]]
"""A row of the metrics of a board."""
PARAMETERS = ("standing_number", "unsure", "order", "result_id")
"""The order of rows, as columns and as parameters of a statement."""


class Place(NamedTuple):
    """The place of a row of a board: its position, and its rank with the interval of the rank's first row."""

    workload_digest: str
    group: int
    order: float
    result_id: str
    position: int
    rank: int | None
    low: float | None
    high: float | None

    def has_rank_of(self, row: Found) -> bool:
        """Whether the next row shares the rank."""
        if self.low is None or self.high is None or row.low is None:
            return row.low is None and self.low is None
        return bool(row.low <= self.high and self.low <= row.high)

    def cursor(self) -> str:
        """The cursor of the rows that follow."""
        return encode_cursor(*self)


def place_of(cursor: str) -> Place:
    """The place that a cursor continues from. Raises CursorError."""
    return Place(*decode_cursor(cursor, *_KINDS))


def ranked(
    workload_digest: str, rows: Iterable[Found], place: Place | None
) -> tuple[list[int | None], Place | None]:
    """The rank of each row of metrics, in order, given the place where the page before ended; and the last's place."""
    found = []
    for row in rows:
        place = _next(workload_digest, row, place)
        found.append(place.rank)
    return found, place


def parameters(place: Place) -> dict[str, bool | float | str]:
    """The place as parameters of a statement that reads the rows that follow it."""
    return dict(zip(PARAMETERS, (place.group, place.low is None, place.order, place.result_id), strict=True))


def _next(workload_digest: str, row: Found, before: Place | None) -> Place:
    position = before.position + 1 if before else 1
    rank, low, high = position, row.low, row.high
    if before is not None and before.rank is not None and before.has_rank_of(row):
        rank, low, high = before.rank, before.low, before.high
    ranked = rank if row.standing is Standing.CURRENT else None
    return Place(workload_digest, GROUPS[row.standing], row.place, row.result_id, position, ranked, low, high)
