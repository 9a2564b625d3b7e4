"""Withdrawn results and jobs: what they leave, and what takes their place."""

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from optigpu.documents.result import Attribution, AttributionRow, Gain, Result, Samples
from optigpu.documents.views import WithdrawalView
from optigpu.store import events, jobs, leaderboard, leases, outcomes, results, withdrawals
from optigpu.store.artifacts import Artifact
from optigpu.store.database import Database
from optigpu.store.errors import WithdrawnError
from optigpu.store.filters import LeaderboardQuery
from optigpu.store.leases import Lease
from optigpu.store.tables import Base, EnvironmentRow
from optigpu.store.withdrawals import Withdrawal
from optigpu.vocabulary import JobState, Role, VariantStatus
from tests.service.records import a_result, a_spec, a_worker, an_outcome, planned

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
