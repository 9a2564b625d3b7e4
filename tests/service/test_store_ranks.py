"""Ranks on the leaderboard: shared by overlapping intervals, none for what has no interval, the same on every page."""

import pytest
from sqlalchemy.orm import Session

from optigpu.documents.views import LeaderboardRow
from optigpu.store import leaderboard
from optigpu.store.database import Database
from optigpu.store.filters import LeaderboardQuery
from tests.service.records import a_metric, a_result, a_speed, enter

INTERVALS = [
    (100.0, 96.0, 104.0, 1),  # the yardstick of rank 1
    (98.0, 95.0, 101.0, 1),
    (97.0, 90.0, 99.0, 1),
    (92.0, 91.0, 95.5, 4),  # overlaps the row before it, but not the yardstick
    (90.0, 85.0, 91.0, 4),  # touches the yardstick of rank 4
    (80.0, 80.0, 80.0, 6),
    (80.0, 80.0, 80.0, 6),
    (79.0, 78.0, 79.5, 8),
]


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_ranks_are_shared_by_overlap_with_the_first_and_the_same_on_every_page(
    database: Database, limit: int
) -> None:
    with database.write() as session:
        for number, (value, low, high, _) in reversed(list(enumerate(INTERVALS))):
            enter(session, a_speed(value, (low, high), stack=(f"t{number}",)))
    with database.read() as session:
        ranked = _ranked(session, "tokens_per_s", limit)
    assert ranked == [(value, rank) for value, _, _, rank in INTERVALS]


def test_ranks_go_by_overlap_where_lower_is_better_too(database: Database) -> None:
    with database.write() as session:
        for name, value, low, high in (("a", 1.0, 0.9, 1.2), ("b", 1.1, 1.0, 1.3), ("c", 1.25, 1.21, 1.3)):
            metrics = {"ttft_s": a_metric("ttft_s", value, (low, high))}
            enter(session, a_result(metrics, stack=(name,)))
        (board,) = leaderboard.query(session, LeaderboardQuery(metric="ttft_s")).boards
    assert [(row.label, row.rank) for row in board.rows] == [("a", 1), ("b", 1), ("c", 3)]


UNSURE = [
    (100.0, (99.0, 101.0), 1),
    (50.0, (49.0, 51.0), 2),
    (110.0, None, 3),  # a higher value, but nothing says how exact it is
    (100.0, None, 3),
    (40.0, None, 3),
]


@pytest.mark.parametrize(("metric", "limit"), [("tokens_per_s", 1), ("tokens_per_s", 3), ("ttft_s", 50)])
def test_rows_without_an_interval_follow_those_with_one_and_share_a_rank(
    database: Database, metric: str, limit: int
) -> None:
    sign = 1 if metric == "tokens_per_s" else -1
    board = [
        (sign * value, ci and (min(sign * ci[0], sign * ci[1]), max(sign * ci[0], sign * ci[1])), rank)
        for value, ci, rank in UNSURE
    ]
    with database.write() as session:
        for number, (value, ci, _) in reversed(list(enumerate(board))):
            enter(session, a_result({metric: a_metric(metric, value, ci)}, stack=(f"t{number}",)))
        assert _ranked(session, metric, limit) == [(value, rank) for value, _, rank in board]


def test_rows_without_an_interval_share_the_first_rank_where_no_row_has_one(database: Database) -> None:
    with database.write() as session:
        for value in (3.0, 2.0, 1.0):
            enter(session, a_speed(value, None, stack=(f"{value}",)))
        assert _ranked(session, "tokens_per_s", 2) == [(3.0, 1), (2.0, 1), (1.0, 1)]


def test_what_is_counted_is_exact_without_an_interval(database: Database) -> None:
    metric = "weight_bytes"
    with database.write() as session:
        for name, size in (("a", 1.0), ("b", 2.0), ("c", 2.0), ("d", 3.0)):
            enter(session, a_result({metric: a_metric(metric, size)}, stack=(name,)))
        assert _ranked(session, metric, 50) == [(1.0, 1), (2.0, 2), (2.0, 2), (3.0, 4)]


def _ranked(session: Session, metric: str, limit: int) -> list[tuple[float | None, int | None]]:
    """The value and rank of every row, page by page."""
    rows: list[LeaderboardRow] = []
    cursor: str | None = None
    while not rows or cursor:
        (board,) = leaderboard.query(
            session, LeaderboardQuery(metric=metric, limit=limit, cursor=cursor)
        ).boards
        rows += board.rows
        cursor = board.next_cursor
    assert len({row.result_id for row in rows}) == len(rows)
    return [(row.value.value, row.rank) for row in rows]
