"""Reads the leaderboard: boards of results that can be compared, each ranked by one metric.

Order of a board's rows: current results, then earlier ones, then invalid ones; within each the rows whose metric has a
95% interval come first; then the metric's value, best first, and equal values by result id.

Only current results have a rank. A row shares the rank of the row before it if its interval touches the interval of the
first row of that rank (of that row only, so that a chain of overlaps is not one rank); else its rank is its position
(1, 1, 3). Rows without an interval share one rank below all others: their precision is unknown. Counted metrics
(COUNTED_METRICS, such as `weight_bytes`) are exact without an interval.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple

from pydantic import BaseModel
from sqlalchemy import Connection, Row, Select, bindparam, case, exists, func, or_, select, tuple_
from sqlalchemy.orm import Session

from optigpu.documents.queries import HEAD_ROWS, ROWS, LeaderboardQuery
from optigpu.documents.result import MetricSummary
from optigpu.documents.views import Baseline, BoardName, LeaderboardPage, RowFacts, Standing
from optigpu.store import filters, others
from optigpu.store.entries import stack_text
from optigpu.store.filters import OF_BOARD, OF_ENTRY, OF_METRIC, Values
from optigpu.store.statements import decode_cursor, encode_cursor, newest_of
from optigpu.store.tables import BoardRow, LeaderboardEntry, MetricRow
from optigpu.vocabulary import METRICS, Document, NotFoundError

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


def parameters_of(place: Place) -> dict[str, bool | float | str]:
    """The place as parameters of a statement that reads the rows that follow it."""
    return dict(zip(PARAMETERS, (place.group, place.low is None, place.order, place.result_id), strict=True))


BOARDS = 10
"""How many boards a page has."""
SHOWN = (Standing.CURRENT, Standing.INVALID)
"""A board is listed for what it has of these: earlier results are the history of a current one."""
BASELINE_BACKEND = "torch"
MOST_HARDWARE = 100_000
NO_RESULTS = "There are no results yet. Submit a job; its results appear here when they are measured."

Columns = tuple[Any, ...]
Names = tuple[str, ...]
"""Filters that are set, in the order of OF_BOARD or of OF_ENTRY."""

metrics, entries, boards = MetricRow.__table__.c, LeaderboardEntry.__table__.c, BoardRow.__table__.c
_METRIC = func.coalesce(bindparam("metric", type_=metrics.name.type), boards.primary_metric)
_GROUP = case({standing.value: number for standing, number in GROUPS.items()}, value=metrics.standing)
_ORDER = (_GROUP, metrics.unsure, metrics.place, metrics.result_id)
"""The order of a board's rows."""


def query(session: Session, query: LeaderboardQuery) -> LeaderboardPage:
    """A page of boards, or of the rows of one. Raises NotFoundError for an unknown metric, CursorError."""
    return LeaderboardPage.model_validate(read(session.connection(), query))


def read(connection: Connection, query: LeaderboardQuery) -> Document:
    """The document of such a page, for which a session takes long to make. Raises as `query` does."""
    if query.metric is not None and query.metric not in METRICS:
        raise NotFoundError(f"There is no metric {query.metric!r}; the metrics are {', '.join(METRICS)}.")
    after = newest_of(query.cursor)
    place = place_of(query.cursor) if query.cursor is not None and after is None else None
    of_board = filters.of_board(query, after)
    if place is not None:
        of_board["digest"] = place.workload_digest
    of_entry = filters.of_entry(query)
    found = _boards(connection, query, of_board, of_entry, listed="digest" not in of_board)
    alone = len(found) == 1 and after is None
    limit = query.limit or (ROWS if alone else HEAD_ROWS)
    page = _Reader(connection, query, of_entry, limit, place).read(found[:BOARDS])
    without_rows = "digest" in of_board and not all(board["rows"] for board in page)
    if without_rows and not _boards(connection, query, of_board, of_entry, listed=True):
        page = []
    note = None
    if not page:
        is_empty = connection.scalar(select(boards.number).limit(1)) is None
        note = NO_RESULTS if is_empty else "No result matches all of these filters; leave one out."
    return {
        "boards": page,
        "note": note,
        "next_cursor": encode_cursor(found[BOARDS - 1].newest) if len(found) > BOARDS else None,
        "others": others.read(connection, query) if query.others and query.cursor is None else [],
    }


def names(session: Session, workload: str | None = None) -> list[BoardName]:
    """The boards of a workload or of all, without their rows, the one with the newest result first."""
    query = LeaderboardQuery(workload=workload)
    found = _boards(session.connection(), query, filters.of_board(query, None), {}, listed=True)
    return [
        BoardName(workload_digest=board.workload_digest, workload=board.document, model=board.model)
        for board in found[:BOARDS]
    ]


def baseline_of(session: Session, result_id: str) -> Baseline | None:
    """What the hardware of a result does on its board without any technique, by the primary metric; None where that was
    not measured."""
    entry = session.get(LeaderboardEntry, result_id)
    if entry is None:
        return None
    found = _baselines(session.connection(), None, {entry.board: {entry.hardware_class}})[entry.board]
    return next((each for each in found if each.device == entry.device), None)


@dataclass(frozen=True)
class _Reader:
    """Reads the rows of boards; `of_entry` are the filters of entries that are set, with what they ask for."""

    connection: Connection
    query: LeaderboardQuery
    of_entry: Values
    limit: int
    place: Place | None

    def read(self, found: Sequence[Found]) -> list[dict[str, Any]]:
        """A `Board` of each: its first rows, or those that follow the place."""
        of_entry = self.of_entry | ({"clean": True} if self.query.clean else {})
        numbers = [board.number for board in found]
        rows = self._rows(numbers, of_entry, self.limit + 1, self.place)
        of_boards = {number: list(group) for number, group in groupby(rows, key=attrgetter("board"))}
        counts = {number: group[0].number for number, group in of_boards.items()}
        if self.place is not None and not rows:  # all of those that followed were withdrawn
            counts = {numbers[0]: self._count(numbers, of_entry)}
        page = [
            self._board(each, of_boards.get(each.number, []), counts.get(each.number, 0)) for each in found
        ]
        if self.query.best:
            hardware = {
                number: {row.hardware_class for row in group[: self.limit]}
                for number, group in of_boards.items()
            }
            baselines = _baselines(self.connection, self.query.metric, hardware)
            for each, board in zip(found, page, strict=True):
                board["baselines"] = [of.model_dump(mode="json") for of in baselines[each.number]]
        return page

    def _rows(
        self, numbers: Sequence[int], of_entry: Values, limit: int, place: Place | None = None
    ) -> Sequence[Found]:
        """Of each board, by its number, its first rows, or those that follow a place."""
        values = of_entry | (parameters_of(place) if place else {})
        values |= {"board": numbers[0]} if len(numbers) == 1 else {"boards": numbers}
        statement = _rows(
            _set(OF_ENTRY, of_entry),
            tuple(self.query.standings),
            alone=len(numbers) == 1,
            best=self.query.best,
            continues=place is not None,
        )
        values |= {"metric": self.query.metric, "limit": limit}
        return self.connection.execute(statement, values).all()

    def _count(self, numbers: Sequence[int], of_entry: Values) -> int:
        """How many rows a board has on all pages."""
        first = self._rows(numbers, of_entry, 1)
        return first[0].number if first else 0

    def _board(self, board: Found, rows: Sequence[Found], count: int) -> dict[str, Any]:
        metric = self.query.metric or board.primary_metric
        shown, last = ranked(board.workload_digest, rows[: self.limit], self.place)
        return {
            "workload_digest": board.workload_digest,
            "workload": board.document,
            "model": board.model,
            "metric": metric,
            "unit": METRICS[metric].unit,
            "better": METRICS[metric].better,
            "row_count": count,
            "not_ranked": _by_reason(board),
            "baselines": [],
            "note": None if count else self._why_empty(board, metric),
            "next_cursor": last.cursor() if last and len(rows) > self.limit else None,
            "links": {},
            "rows": [_row(row, rank, metric) for row, rank in zip(rows, shown, strict=False)],
        }

    def _why_empty(self, board: Found, metric: str) -> str:
        """Why a board has no rows: its results are invalid, have warnings, or lack the metric."""
        sentences = []
        if board.invalid and not self.query.include_invalid:
            sentences.append(_not_ranked(board))
        if self.query.clean and (warned := self._count([board.number], self.of_entry)):
            results = "1 result has" if warned == 1 else f"{warned} results have"
            sentences.append(f"{results} warnings, which clean=true leaves out.")
        return " ".join(sentences) or f"No result has {metric}; choose another metric."


def _row(found: Found, rank: int | None, metric: str) -> Document:
    """A `LeaderboardRow`."""
    return {
        **_ABSENT_FACTS,
        **found.shown,
        "rank": rank,
        "standing": found.standing,
        "superseded": found.superseded,
        "earlier": found.earlier,
        "pareto": found.pareto,
        "metric": metric,
        "value": {**_ABSENT_FIGURES, **found.summary},
    }


def _absent(kind: type[BaseModel]) -> Document:
    """What a document has in place of fields that were added after it was stored."""
    optional = {name: field for name, field in kind.model_fields.items() if not field.is_required()}
    return {name: field.get_default(call_default_factory=True) for name, field in optional.items()}


_ABSENT_FACTS, _ABSENT_FIGURES = _absent(RowFacts), _absent(MetricSummary)


def _boards(
    connection: Connection, query: LeaderboardQuery, of_board: Values, of_entry: Values, *, listed: bool
) -> Sequence[Found]:
    """The boards that the filters find, and one more than a page has; if `listed`, those with a result to list."""
    statement = _boards_statement(
        _set(OF_BOARD, of_board),
        _set(OF_ENTRY, of_entry),
        listed=listed,
        # A board that is asked for by itself is listed for an invalid result without the metric, too.
        without_metric=query.metric is None and "digest" in of_board,
    )
    values = of_board | of_entry | {"metric": query.metric, "limit": BOARDS + 1}
    return connection.execute(statement, values).all()


def _baselines(
    connection: Connection, metric: str | None, hardware: Mapping[int, Collection[str]]
) -> defaultdict[int, list[Baseline]]:
    """The best current results of the empty stack on these classes of hardware, by the numbers of boards."""
    found: defaultdict[int, list[Baseline]] = defaultdict(list)
    asked = {"boards": list(hardware), "backend": BASELINE_BACKEND, "stack": stack_text(())}
    statement = _rows(("backend", "stack"), (Standing.CURRENT,), alone=False, best=True, continues=False)
    values = asked | {"metric": metric, "limit": MOST_HARDWARE}
    for row in sorted(connection.execute(statement, values), key=attrgetter("result_id")):
        if row.hardware_class in hardware[row.board]:
            each = {"hardware": row.hardware_class, "device": row.shown["device"], "value": row.summary}
            found[row.board].append(Baseline.model_validate(each | {"result_id": row.result_id}))
    return found


# Building a statement takes longer than running it, so each is built once for each set of filters.


@lru_cache(maxsize=4096)
def _boards_statement(
    of_board: Names, of_entry: Names, *, listed: bool, without_metric: bool
) -> Select[*Columns]:
    statement = select(*BoardRow.__table__.c).where(*(OF_BOARD[name] for name in of_board))
    if listed:
        ranked = exists().where(
            metrics.board == boards.number,
            metrics.name == _METRIC,
            metrics.standing.in_(SHOWN),
            *(OF_METRIC[name] for name in of_entry),
        )
        invalid = exists().where(
            entries.board == boards.number,
            entries.standing == Standing.INVALID,
            *(OF_ENTRY[name] for name in of_entry),
        )
        statement = statement.where(or_(ranked, invalid) if without_metric else ranked)
    return statement.order_by(boards.newest.desc()).limit(bindparam("limit"))


@lru_cache(maxsize=4096)
def _rows(
    of_entry: Names, standings: tuple[Standing, ...], *, alone: bool, best: bool, continues: bool
) -> Select[*Columns]:
    """The first `limit` rows of each board, or of one board those that follow a place, each with the number of all.

    What IN holds is written anew for each run, so one board is compared by itself. The plan of literals is kept.
    """
    here = (
        metrics.board == bindparam("board")
        if alone
        else metrics.board.in_(bindparam("boards", expanding=True)),
        metrics.name == _METRIC,
        or_(*(metrics.standing == bindparam(None, standing, literal_execute=True) for standing in standings)),
    )
    keys = [each.label(name) for each, name in zip(_ORDER, PARAMETERS, strict=True)]
    place = (metrics.board, metrics.standing, metrics.hardware_class)
    of_class = func.row_number().over(partition_by=place, order_by=_ORDER).label("of_class")
    found = (
        select(metrics.board, metrics.name, *keys, *([of_class] if best else []))
        .join(BoardRow.__table__, boards.number == metrics.board)
        .where(*here, *(OF_METRIC[name] for name in of_entry))
        .subquery("found")
    )
    counted: Select[*Columns] = select(
        *found.c, func.count().over(partition_by=found.c.board).label("number")
    )
    each = (counted.where(found.c.of_class == 1) if best else counted).subquery("each")
    following = [each.c[name] for name in PARAMETERS]
    position = func.row_number().over(partition_by=each.c.board, order_by=following).label("position")
    numbered: Select[*Columns] = select(*each.c, position)
    if continues:
        last = tuple_(*(bindparam(column.name, type_=column.type) for column in following))
        numbered = numbered.where(tuple_(*following) > last)
    page = numbered.subquery("page")
    same = (metrics.result_id == page.c.result_id) & (metrics.name == page.c.name)
    return (
        select(
            *(page.c.board, page.c.number),
            *(metrics[name] for name in ("result_id", "standing", "place", "low", "high", "summary")),
            *(entries[name] for name in ("superseded", "earlier", "pareto", "hardware_class", "shown")),
        )
        .select_from(page)
        .join(MetricRow.__table__, same)
        .join(LeaderboardEntry.__table__, entries.result_id == page.c.result_id)
        .where(page.c.position <= bindparam("limit"))
        .order_by(page.c.board, page.c.position)
    )


def _set(known: Iterable[str], given: Values) -> Names:
    return tuple(name for name in known if name in given)


def _by_reason(board: Found) -> dict[str, int]:
    """How many results are invalid for each reason, the most frequent first: one with two reasons counts for both."""
    counts: dict[str, int] = {}
    for reasons, count in board.invalid.items():
        for reason in reasons.split():
            counts[reason] = counts.get(reason, 0) + count
    return dict(sorted(counts.items(), key=lambda each: (-each[1], each[0])))


def _not_ranked(board: Found) -> str:
    results, reasons = sum(board.invalid.values()), _by_reason(board)
    are = "result is" if results == 1 else "results are"
    named = [f"{reason} ({count})" for reason, count in reasons.items()]
    why = ", ".join(named) if len(named) > 1 else "".join(reasons)
    return f"{results} {are} not ranked: {why}. Show them with include_invalid=true."
