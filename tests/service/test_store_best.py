"""The best row of each class of hardware, with the baseline there."""

from typing import Any

import pytest

from optigpu.documents.result import Result, VerdictWarning
from optigpu.store import leaderboard
from optigpu.store.database import Database
from optigpu.store.filters import LeaderboardQuery
from optigpu.vocabulary import DeviceKind
from tests.service.records import a_metric, a_result, enter

FAST, SLOW, ALONE = "1x Fast CPU", "1x Slow CPU", "1x Lonely CPU"


def _speed(value: float, hardware: str, *stack: str, **changes: Any) -> Result:
    metrics = {"tokens_per_s": a_metric("tokens_per_s", value, (0.95 * value, 1.05 * value))}
    return a_result(metrics, hardware=hardware, stack=stack, **changes)


@pytest.fixture
def filled(database: Database) -> Database:
    """Three classes of hardware; one has no baseline."""
    with database.write() as session:
        for hardware, factor in ((FAST, 10.0), (SLOW, 9.5)):
            enter(session, _speed(factor, hardware))
            enter(session, _speed(2 * factor, hardware, "bf16"))
            enter(session, _speed(5 * factor, hardware, "int8_weight_only", warnings=()))
        enter(session, _speed(1.0, ALONE, "bf16", warnings=(VerdictWarning.FEW_SAMPLES,)))
        enter(session, _speed(99.0, ALONE, "fp16", valid=False))
    return database


def test_each_hardware_has_its_best_row_and_ties_share_a_rank(filled: Database) -> None:
    with filled.read() as session:
        (board,) = leaderboard.query(session, LeaderboardQuery(best=True)).boards
    found = [(row.hardware, row.value.value, row.rank) for row in board.rows]
    assert found == [(FAST, 50.0, 1), (SLOW, 47.5, 1), (ALONE, 1.0, 3)]
    assert board.row_count == 3
    baselines_ = {each.hardware: (each.value.value, each.device) for each in board.baselines}
    assert baselines_ == {FAST: (10.0, DeviceKind.CPU), SLOW: (9.5, DeviceKind.CPU)}


def test_the_best_is_looked_for_among_what_passes_the_filters(filled: Database) -> None:
    with filled.read() as session:
        (board,) = leaderboard.query(session, LeaderboardQuery(best=True, technique="bf16")).boards
        (clean,) = leaderboard.query(session, LeaderboardQuery(best=True, clean=True)).boards
        (all_,) = leaderboard.query(session, LeaderboardQuery()).boards
    assert [row.value.value for row in board.rows] == [20.0, 19.0, 1.0]
    assert [row.hardware for row in clean.rows] == [FAST, SLOW]
    assert (len(all_.rows), all_.baselines) == (7, ())


def test_baselines_are_of_the_hardware_of_the_rows_that_are_shown(filled: Database) -> None:
    with filled.read() as session:
        (board,) = leaderboard.query(session, LeaderboardQuery(best=True, limit=1)).boards
        (of_one,) = leaderboard.query(session, LeaderboardQuery(best=True, hardware="slow")).boards
    assert [(each.hardware, each.value.value) for each in board.baselines] == [(FAST, 10.0)]
    assert [each.hardware for each in of_one.baselines] == [SLOW]


def test_boards_have_names_without_their_rows(filled: Database) -> None:
    with filled.read() as session:
        (board,) = leaderboard.query(session, LeaderboardQuery()).boards
        (name,) = leaderboard.names(session)
        assert leaderboard.names(session, board.workload_digest) == [name]
        assert leaderboard.names(session, "f" * 64) == []
    assert (name.workload_digest, name.workload, name.model) == (
        board.workload_digest,
        board.workload,
        board.model,
    )


def test_the_best_rows_have_pages(filled: Database) -> None:
    with filled.read() as session:
        (board,) = leaderboard.query(session, LeaderboardQuery(best=True, limit=2)).boards
        (rest,) = leaderboard.query(
            session, LeaderboardQuery(best=True, workload=board.workload_digest, cursor=board.next_cursor)
        ).boards
    assert [(row.hardware, row.rank) for row in rest.rows] == [(ALONE, 3)]


def test_a_result_finds_its_baseline(filled: Database) -> None:
    with filled.read() as session:
        (board,) = leaderboard.query(session, LeaderboardQuery(best=True)).boards
        found = {row.hardware: leaderboard.baseline_of(session, row.result_id) for row in board.rows}
    assert {hardware: each.value.value if each else None for hardware, each in found.items()} == {
        FAST: 10.0,
        SLOW: 9.5,
        ALONE: None,
    }
