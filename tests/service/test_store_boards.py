"""Boards: what they hold, their pages, why they are empty, what is listed on request, their best rows, Pareto flags as
results come and go, and what withdrawals leave."""

import random
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from optigpu.documents.queries import LeaderboardQuery
from optigpu.documents.result import (
    Attribution,
    AttributionRow,
    Gain,
    Result,
    Samples,
    VerdictReason,
    VerdictWarning,
)
from optigpu.documents.views import Standing, WithdrawalView
from optigpu.store import events, jobs, leaderboard, leases, outcomes, results, standings, withdrawals
from optigpu.store.database import Database, WithdrawnError
from optigpu.store.leases import Lease
from optigpu.store.results import Artifact
from optigpu.store.standings import beats, costs_of
from optigpu.store.tables import Base, EnvironmentRow, LeaderboardEntry
from optigpu.store.withdrawals import Withdrawal
from optigpu.vocabulary import DeviceKind, JobState, Role, VariantStatus, new_id
from tests.service.records import (
    a_metric,
    a_result,
    a_spec,
    a_speed,
    a_worker,
    an_outcome,
    board_of,
    enter,
    planned,
)


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


FAST, SLOW, ALONE = "1x Fast CPU", "1x Slow CPU", "1x Lonely CPU"


def _speed(value: float, hardware: str, *stack: str, **changes: Any) -> Result:
    return a_speed(value, (0.95 * value, 1.05 * value), hardware=hardware, stack=stack, **changes)


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


LATER = {"optigpu": "0.2.0", "torch": "2.14.0"}


@pytest.mark.slow
def test_flags_are_those_of_a_comparison_of_all_rows_whatever_came_and_went(database: Database) -> None:
    random_ = random.Random(7)
    known: list[str] = []
    with database.write() as session:
        for step in range(60):
            if known and random_.random() < 0.3:
                standings.remove(session, [known.pop(random_.randrange(len(known)))])
            else:
                result = _made(random_)
                results.add(session, result, {})
                standings.enter(session, result)
                known.append(result.id)
            assert _kept(session) == _compared(session), f"after step {step}"
        assert set(_kept(session).values()) == {True, False, None}
        standings.remove(session, known)
        assert _kept(session) == {}


def test_a_result_of_unknown_quality_beats_none_that_has_one(database: Database) -> None:
    with database.write() as session:
        enter(session, _of("unmeasured", _figures(100.0, 1.0, None, None)))
        enter(session, _of("measured", _figures(50.0, 2.0, 0.1, None)))
        enter(session, _of("better", _figures(60.0, 2.0, 0.05, 3.0)))
        flags = {each.variant_digest: each.pareto for each in session.scalars(select(LeaderboardEntry))}
        by_label = [flags[_of(name).variant.variant_digest] for name in ("unmeasured", "measured", "better")]
    assert by_label == [True, False, True]


def _made(random_: random.Random) -> Result:
    """One of twenty configurations on two classes of hardware, so that places get several results."""
    figures = _figures(
        random_.choice((1.0, 2.0, 3.0)),
        random_.choice((1.0, 2.0, None)),
        random_.choice((0.1, 0.2, None)),
        random_.choice((5.0, None)),
    )
    return _of(
        f"t{random_.randrange(10)}",
        figures,
        hardware=random_.choice(("1x Test CPU", "2x Test CPU")),
        valid=random_.random() > 0.1,
        software=random_.choice((None, LATER)),
    )


def _of(name: str, metrics: dict[str, Any] | None = None, **changes: Any) -> Result:
    return a_result(metrics, stack=(name,), id=new_id(), **changes)


def _figures(speed: float, size: float | None, kld: float | None, joules: float | None) -> dict[str, Any]:
    values = {"tokens_per_s": speed, "weight_bytes": size, "kld_mean": kld, "j_per_token": joules}
    return {name: a_metric(name, value) for name, value in values.items()}


def _kept(session: Session) -> dict[str, bool | None]:
    session.expire_all()
    return {each.result_id: each.pareto for each in session.scalars(select(LeaderboardEntry))}


def _compared(session: Session) -> dict[str, bool | None]:
    entries = session.scalars(select(LeaderboardEntry)).all()
    current = [each for each in entries if each.standing is Standing.CURRENT]
    flags: dict[str, bool | None] = dict.fromkeys((each.result_id for each in entries), None)
    for each in current:
        costs = costs_of(each)
        if costs is None:
            continue
        others = [
            theirs
            for other in current
            if (other.board, other.hardware_class) == (each.board, each.hardware_class)
            and (theirs := costs_of(other)) is not None
        ]
        flags[each.result_id] = not any(beats(theirs, costs) for theirs in others)
    return flags


WHY = Withdrawal(reason="The fan was broken.", withdrawn_by="alice", key_id="key-1")
SAMPLES: dict[str, Samples] = {"tokens_per_s": ((1.0, 2.0),)}


def test_withdrawing_again_changes_nothing(database: Database) -> None:
    result = a_result()
    job_id = _measure(database, result)
    with database.write() as session:
        first = _withdraw(session, result)
    other = Withdrawal(reason="Another reason.", withdrawn_by="bob")
    with database.write() as session:
        assert withdrawals.withdraw_result(session, result.id, other) == first
        job = withdrawals.withdraw_job(session, job_id, WHY)
        assert withdrawals.withdraw_job(session, job_id, other) == job
        assert withdrawals.withdraw_result(session, result.id, other) == first


def test_a_withdrawn_job_takes_its_results_with_it(database: Database) -> None:
    made = [a_result(), a_result(index=1, stack=("bf16",))]
    job_id = _measure(database, *made)
    kept = a_result(stack=("fp16",))
    _measure(database, kept)
    with database.write() as session:
        stone = withdrawals.withdraw_job(session, job_id, WHY)
        assert (stone.kind, stone.reason) == ("job", WHY.reason)
        for read in (jobs.get, events.head, jobs.request_cancel):
            with pytest.raises(WithdrawnError, match=r"The job .* was withdrawn"):
                read(session, job_id)
        for result in made:
            with pytest.raises(WithdrawnError, match=r"The result .* was withdrawn"):
                results.get(session, result.id)
        (board,) = leaderboard.query(session, LeaderboardQuery()).boards
        assert [row.result_id for row in board.rows] == [kept.id]
        assert job_id not in [job.id for job in jobs.list_(session).jobs]
        left = {
            table.name: session.scalar(select(func.count()).select_from(table))
            for table in Base.metadata.sorted_tables
        }
        assert (left["jobs"], left["results"], left["variants"], left["tombstones"]) == (1, 1, 1, 3)
        assert session.scalar(select(func.count()).select_from(EnvironmentRow)) == 1


def test_a_queued_job_that_is_withdrawn_never_runs(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec(), idempotency_key="key").job.id
        withdrawals.withdraw_job(session, job_id, WHY)
        assert leases.claim(session, a_worker(), 30) is None
        assert jobs.submit(session, a_spec(), idempotency_key="key").created


def test_a_job_forgets_a_withdrawn_result_and_the_gains_that_rest_on_it(database: Database) -> None:
    made = [a_result(), a_result(index=1, stack=("bf16",)), a_result(index=2, stack=("fp16",))]
    gain = Gain(ratio=2.0, ci=(1.9, 2.1), compared_with=0)
    added = Gain(ratio=1.1, ci=None, compared_with=1)
    rows = [
        AttributionRow(index=0, role=Role.BASELINE, label="baseline", status=VariantStatus.SUCCEEDED),
        AttributionRow(index=1, role=Role.ALONE, label="bf16", status=VariantStatus.SUCCEEDED, speedup=gain),
        AttributionRow(
            index=2, role=Role.ALONE, label="fp16", status=VariantStatus.SUCCEEDED, speedup=gain, added=added
        ),
    ]
    job_id = _measure(
        database, *made, attribution=Attribution(metric="tokens_per_s", rows=tuple(rows), best=1)
    )
    with database.write() as session:
        _withdraw(session, made[1])
        job = jobs.get(session, job_id)
        told = [each.data for each in events.after(session, job_id, 0)]
        assert [each["id"] for each in results.of_job(session, job_id)] == [made[0].id, made[2].id]
    assert [variant.result_id for variant in job.variants] == [made[0].id, None, made[2].id]
    assert job.variants[1].reason == "Its result was withdrawn: The fan was broken."
    assert job.attribution is not None
    assert Attribution.model_validate(job.attribution).best is None
    assert [
        (row["speedup"] is None, row["added"] is None, row["reason"]) for row in job.attribution["rows"]
    ] == [
        (True, True, None),
        (True, True, "Its result was withdrawn: The fan was broken."),
        (False, True, None),
    ]
    assert made[1].id not in str(told)
    assert made[2].id in str(told)
    assert [each["attribution"] for each in told if "attribution" in each] == [job.attribution]


def _measure(database: Database, *made: Result, attribution: Attribution | None = None) -> str:
    """Stores the results of a job that has succeeded."""
    lease = _claimed(database, *made)
    file = Artifact(name="trace.json", media_type="application/json", size_bytes=2, data=b"{}")
    with database.write() as session:
        for result in made:
            outcomes.save_outcome(session, lease, an_outcome(result, SAMPLES), [file])
        outcomes.finish(session, lease, JobState.SUCCEEDED, attribution=attribution)
    return lease.job_id


def _claimed(database: Database, *made: Result) -> Lease:
    with database.write() as session:
        return planned(session, *(result.variant.label for result in made))


def _withdraw(session: Session, result: Result) -> WithdrawalView:
    return withdrawals.withdraw_result(session, result.id, WHY)
