"""Boards: what they hold, their pages, why they are empty, and what is listed on request."""

from typing import Any

from optigpu.documents.result import VerdictReason
from optigpu.store import leaderboard
from optigpu.store.database import Database
from optigpu.store.filters import LeaderboardQuery
from tests.service.records import a_result, a_speed, board_of, enter


def test_boards_hold_what_can_be_compared_and_the_one_with_the_newest_result_is_first(
    database: Database,
) -> None:
    with database.write() as session:
        for model in ("preset:gpt2", "preset:opt-125m"):
            for size in (1, 2):
                enter(session, a_speed(float(size), model=model, size=size))
        enter(session, a_result(workload="matmul"))
        enter(session, a_speed(9.0, (8.9, 9.1), hardware="1x Test GPU"))
        page = leaderboard.query(session, LeaderboardQuery())
        assert [(each.workload["kind"], each.model, each.workload["size"]) for each in page.boards] == [
            ("generate", "preset:gpt2", 1),
            ("matmul", None, 1),
            ("generate", "preset:opt-125m", 2),
            ("generate", "preset:opt-125m", 1),
            ("generate", "preset:gpt2", 2),
        ]
        assert [[row.rank for row in board.rows] for board in page.boards] == [[1, 2], [1], [1], [1], [1]]
        assert [board.metric for board in page.boards[:2]] == ["tokens_per_s", "tflops"]
        assert [row.hardware for row in page.boards[0].rows] == ["1x Test GPU", "1x Test CPU"]


def test_one_board_shows_its_rows_and_several_show_their_first(database: Database) -> None:
    with database.write() as session:
        for number in range(7):
            enter(session, a_speed(float(number), stack=(f"t{number}",)))
        assert (len(board_of(session).rows), board_of(session).next_cursor) == (7, None)
        enter(session, a_speed(1.0, size=2))
        several = leaderboard.query(session, LeaderboardQuery()).boards
        assert [(len(board.rows), board.row_count) for board in several] == [(1, 1), (5, 7)]
        rest = board_of(session, cursor=several[1].next_cursor)
        assert [row.value.value for row in (*several[1].rows, *rest.rows)] == [
            6.0,
            5.0,
            4.0,
            3.0,
            2.0,
            1.0,
            0.0,
        ]
        assert len(board_of(session, workload=several[1].workload_digest).rows) == 7


def test_an_empty_board_says_why(database: Database) -> None:
    foreign: dict[str, Any] = {"valid": False, "reasons": (VerdictReason.FOREIGN_PROCESS,)}
    with database.write() as session:
        assert leaderboard.query(session, LeaderboardQuery()).note == (
            "There are no results yet. Submit a job; its results appear here when they are measured."
        )
        enter(session, a_speed(1.0, **foreign))
        assert board_of(session).note == (
            "1 result is not ranked: foreign_process. Show them with include_invalid=true."
        )
        enter(session, a_speed(1.0, stack=("bf16",), **foreign))
        board = board_of(session)
        assert (board.rows, board.not_ranked) == ((), {"foreign_process": 2})
        assert board.note == "2 results are not ranked: foreign_process. Show them with include_invalid=true."
        both = (VerdictReason.FOREIGN_PROCESS, VerdictReason.DRIFT)
        enter(session, a_speed(1.0, stack=("fp16",), valid=False, reasons=both))
        assert str(board_of(session).note).startswith(
            "3 results are not ranked: foreign_process (3), drift (1)."
        )
        enter(session, a_speed(1.0, stack=("int8",)))
        assert (board_of(session).note, board_of(session).not_ranked) == (
            None,
            {"foreign_process": 3, "drift": 1},
        )
        assert "1 result has warnings, which clean=true leaves out." in str(
            board_of(session, clean=True).note
        )
        other = leaderboard.query(session, LeaderboardQuery(metric="ttft_s"))
        assert (other.boards, other.note) == ((), "No result matches all of these filters; leave one out.")
