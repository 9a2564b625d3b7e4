"""The leaderboard: boards of results that can be compared, each ranked by one metric.

A board holds the results of one workload digest: a kind of workload with its shapes and its model. Hardware is a
column and a filter. `standings` says which results are current, `ranks` in which order they are listed.
"""

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from optigpu.documents.views import Board, LeaderboardPage, Standing
from optigpu.store import ranks
from optigpu.store.boards import BoardReader
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.store.errors import CursorError
from optigpu.store.filters import LeaderboardQuery, conditions
from optigpu.store.ranks import Place
from optigpu.store.tables import LeaderboardEntry
from optigpu.vocabulary import METRICS, NotFoundError

BOARDS = 20
"""How many boards a page has."""

ROWS = 50
HEAD_ROWS = 5
"""How many rows a board shows where it is the only one, and where there are several."""


def query(session: Session, query: LeaderboardQuery) -> LeaderboardPage:
    """A page of boards, or of the rows of one. Raises NotFoundError for an unknown metric, CursorError."""
    if query.metric is not None and query.metric not in METRICS:
        raise NotFoundError(f"There is no metric {query.metric!r}; the metrics are {', '.join(METRICS)}.")
    place, after = _position(query.cursor)
    found = session.execute(_boards(query, place, after)).all()
    alone = len(found) == 1 and after is None
    limit = query.limit or (ROWS if alone else HEAD_ROWS)
    boards = tuple(_board(session, query, newest, limit, place) for _, newest in found[:BOARDS])
    return LeaderboardPage(
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


def _boards(query: LeaderboardQuery, place: Place | None, after: str | None) -> Select[str, str]:
    """Boards with a current or an invalid result, the one with the newest first: ids begin with their time."""
    newest = func.max(LeaderboardEntry.result_id).label("newest")
    statement = (
        select(LeaderboardEntry.workload_digest, newest)
        .where(LeaderboardEntry.standing != Standing.EARLIER, *conditions(query))
        .group_by(LeaderboardEntry.workload_digest)
    )
    if place is not None:
        statement = statement.where(LeaderboardEntry.workload_digest == place.workload_digest)
    if after is not None:
        statement = statement.having(newest < after)
    return statement.order_by(newest.desc()).limit(BOARDS + 1)


def _board(
    session: Session, query: LeaderboardQuery, newest_id: str, limit: int, place: Place | None
) -> Board:
    newest = session.get_one(LeaderboardEntry, newest_id)
    name = query.metric or newest.primary_metric
    reader = BoardReader(session, query, newest.workload_digest, name)
    rows, next_cursor = reader.rows(limit, place)
    count, not_ranked = reader.count(), reader.not_ranked()
    return Board(
        workload_digest=newest.workload_digest,
        workload=newest.summary["workload"],
        model=newest.model,
        metric=name,
        unit=METRICS[name].unit,
        better=METRICS[name].better,
        rows=rows,
        row_count=count,
        not_ranked=not_ranked.reasons,
        note=None if count else reader.why_empty(not_ranked),
        next_cursor=next_cursor,
    )


def _why_none(session: Session) -> str:
    if session.scalars(select(LeaderboardEntry.result_id).limit(1)).first() is None:
        return "There are no results yet. Submit a job; its results appear here when they are measured."
    return "No result matches all of these filters; leave one out."
