"""The leaderboard: boards of results that can be compared, each ranked by one metric.

A board holds the results of one workload digest: a kind of workload with its shapes and its model. Hardware is a
column and a filter. `standings` says which results are current, `ranks` in which order they are listed.
"""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.views import BoardName, LeaderboardPage
from optigpu.store import board_statements, filters, ranks
from optigpu.store.board_statements import Values
from optigpu.store.boards import BoardFound, BoardsReader
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.store.errors import CursorError
from optigpu.store.filters import LeaderboardQuery
from optigpu.store.page_text import PageText
from optigpu.store.ranks import Place
from optigpu.store.tables import BoardRow
from optigpu.vocabulary import METRICS, NotFoundError

BOARDS = 10
"""How many boards a page has."""

ROWS = 50
HEAD_ROWS = 5
"""How many rows a board shows where it is the only one, and where there are several."""
MOST_COUNTED, MOST_COUNTED_OF_SEVERAL = 100, 20
"""How many of its rows are counted there: more would take long, and nobody reads so many pages."""


def query(session: Session, query: LeaderboardQuery) -> LeaderboardPage:
    """A page of boards, or of the rows of one. Raises NotFoundError for an unknown metric, CursorError."""
    return read(session, query).page()


def read(session: Session, query: LeaderboardQuery) -> PageText:
    """The same, with its rows as they are sent."""
    if query.metric is not None and query.metric not in METRICS:
        raise NotFoundError(f"There is no metric {query.metric!r}; the metrics are {', '.join(METRICS)}.")
    place, after = _position(query.cursor)
    boards = filters.of_board(query, after)
    if place is not None:
        boards["digest"] = place.workload_digest
    entries = filters.of_entry(query)
    found = _boards(session, query, boards, entries)
    alone = len(found) == 1 and after is None
    shown = found[:BOARDS]
    reader = BoardsReader(
        session,
        query,
        entries | ({"clean": True} if query.clean else {}),
        MOST_COUNTED if alone else MOST_COUNTED_OF_SEVERAL,
    )
    limit = query.limit or (ROWS if alone else HEAD_ROWS)
    texts = reader.read(shown, limit) if place is None else reader.read_after(place, shown, limit)
    if (
        "digest" in boards
        and not all(text.rows for text in texts)
        and not _boards(session, query, boards, entries, has_entries=True)
    ):
        texts = ()
    return PageText(
        boards=texts,
        note=None if texts else _why_none(session),
        next_cursor=encode_cursor(found[BOARDS - 1].newest) if len(found) > BOARDS else None,
    )


def names(session: Session, workload: str | None = None) -> list[BoardName]:
    """The boards of a workload or of all, without their rows, the one with the newest result first."""
    query = LeaderboardQuery(workload=workload)
    return [
        BoardName(workload_digest=board.workload_digest, workload=board.document, model=board.model)
        for board in _boards(session, query, filters.of_board(query, None), {})[:BOARDS]
    ]


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
    session: Session,
    query: LeaderboardQuery,
    boards: Values,
    entries: Values,
    *,
    has_entries: bool | None = None,
) -> Sequence[BoardFound]:
    """The boards that the filters list, and one more than a page has.

    Whether the one of a digest has such an entry is asked only where none of its rows is listed.
    """
    statement = board_statements.listed(
        tuple(name for name in board_statements.OF_BOARD if name in boards),
        tuple(name for name in board_statements.OF_ENTRY if name in entries),
        metric=query.metric is not None,
        has_entries="digest" not in boards if has_entries is None else has_entries,
    )
    values = boards | entries | {"metric": query.metric, "limit": BOARDS + 1}
    return [BoardFound(*row) for row in board_statements.run(session, statement, values)]


def _why_none(session: Session) -> str:
    if session.scalars(select(BoardRow.number).limit(1)).first() is None:
        return "There are no results yet. Submit a job; its results appear here when they are measured."
    return "No result matches all of these filters; leave one out."
