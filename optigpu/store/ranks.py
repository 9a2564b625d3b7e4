"""The order of a board's rows, their ranks, and the cursor that continues both on the next page.

Order: current results, then earlier ones, then invalid ones; within each the rows whose metric has a 95% interval come
first; then the metric's value, best first, and equal values by result id.

Only current results have a rank. A row shares the rank of the row before it if its interval touches the interval of the
first row of that rank (of that row only, so that a chain of overlaps is not one rank); else its rank is its position
(1, 1, 3). Rows without an interval share one rank below all others: their precision is unknown. Counted metrics
(COUNTED_METRICS, such as `weight_bytes`) are exact without an interval.
"""

from collections.abc import Iterable
from types import NoneType
from typing import Any, NamedTuple

from sqlalchemy import Row

from optigpu.documents.views import Standing
from optigpu.store.statements import decode_cursor, encode_cursor

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
        position = place.position + 1 if place else 1
        rank, low, high = position, row.low, row.high
        if place is not None and place.rank is not None and place.has_rank_of(row):
            rank, low, high = place.rank, place.low, place.high
        found.append(rank if row.standing is Standing.CURRENT else None)
        key = GROUPS[row.standing], row.place, row.result_id
        place = Place(workload_digest, *key, position, found[-1], low, high)
    return found, place


def parameters(place: Place) -> dict[str, bool | float | str]:
    """The place as parameters of a statement that reads the rows that follow it."""
    return dict(zip(PARAMETERS, (place.group, place.low is None, place.order, place.result_id), strict=True))
