"""The leaderboard: boards of results that can be compared, each ranked by one metric.

A board holds the results of one workload digest: a kind of workload with its shapes and its model. Hardware is a
column and a filter. `standings` says which results are current, `ranks` in which order they are listed.
"""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Select, exists, select
from sqlalchemy.orm import Session

from optigpu.documents.views import LeaderboardPage, Standing
from optigpu.store import baselines, filters, ranks
from optigpu.store.boards import BoardReader
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.store.errors import CursorError
from optigpu.store.filters import LeaderboardQuery
from optigpu.store.page_text import PageText
from optigpu.store.ranks import Place
from optigpu.store.tables import BoardRow, LeaderboardEntry, MetricRow
from optigpu.vocabulary import METRICS, NotFoundError

BOARDS = 10
"""How many boards a page has."""

ROWS = 50
HEAD_ROWS = 5
"""How many rows a board shows where it is the only one, and where there are several."""

SHOWN = (Standing.CURRENT, Standing.INVALID)
"""A board is listed for what it has of these: earlier results are the history of a current one."""


def query(session: Session, query: LeaderboardQuery) -> LeaderboardPage:
    """A page of boards, or of the rows of one. Raises NotFoundError for an unknown metric, CursorError."""
    return read(session, query).page()


def read(session: Session, query: LeaderboardQuery) -> PageText:
    """The same, with its rows as they are sent."""
    if query.metric is not None and query.metric not in METRICS:
        raise NotFoundError(f"There is no metric {query.metric!r}; the metrics are {', '.join(METRICS)}.")
    place, after = _position(query.cursor)
    entries = filters.of_entry(session, query)
    found = session.scalars(_boards(query, entries, place, after)).all()
    alone = len(found) == 1 and after is None
    limit = query.limit or (ROWS if alone else HEAD_ROWS)
    numbers = [board.number for board in found[:BOARDS]]
    without = baselines.of_boards(session, numbers, query.metric) if query.best else {}
    boards = tuple(
        BoardReader(
            *(session, query, entries, board, query.metric or board.primary_metric),
            baselines=without.get(board.number, ()),
        ).read(limit, place)
        for board in found[:BOARDS]
    )
    return PageText(
        boards=boards,
        note=None if boards else _why_none(session),
        next_cursor=encode_cursor(found[BOARDS - 1].newest) if len(found) > BOARDS else None,
    )


def continues_list(cursor: str | None) -> bool:
    """Whether a cursor continues a list of boards, and not the rows of one board. Raises CursorError."""
    return _position(cursor)[1] is not None


def _position(cursor: str | None) -> tuple[Place | None, str | None]:
    """What a cursor continues: the rows of a board after a place, or the boards after the one with a newest result."""
    if cursor is None:
        return None, None
    try:
        (newest,) = decode_cursor(cursor, str)
        return None, newest
    except CursorError:
        return ranks.place_of(cursor), None


def _boards(
    query: LeaderboardQuery,
    entries: Sequence[ColumnElement[bool]],
    place: Place | None,
    after: str | None,
) -> Select[BoardRow]:
    """Boards with a current or an invalid result that passes the filters, the one with the newest result first."""
    statement = select(BoardRow).where(*filters.of_board(query))
    if entries:
        statement = statement.where(_has_entry(entries, query.metric))
    elif query.metric is not None:
        here = MetricRow.board == BoardRow.number, MetricRow.name == query.metric
        statement = statement.where(exists().where(*here, MetricRow.standing.in_(SHOWN)))
    if place is not None:
        statement = statement.where(BoardRow.workload_digest == place.workload_digest)
    if after is not None:
        statement = statement.where(BoardRow.newest < after)
    return statement.order_by(BoardRow.newest.desc()).limit(BOARDS + 1)


def _has_entry(entries: Sequence[ColumnElement[bool]], metric: str | None) -> ColumnElement[bool]:
    measured = () if metric is None else (filters.has_metric(metric),)
    here = LeaderboardEntry.board == BoardRow.number, LeaderboardEntry.standing.in_(SHOWN)
    return exists().where(*here, *entries, *measured)


def _why_none(session: Session) -> str:
    if session.scalars(select(BoardRow.number).limit(1)).first() is None:
        return "There are no results yet. Submit a job; its results appear here when they are measured."
    return "No result matches all of these filters; leave one out."
