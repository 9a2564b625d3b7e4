"""What monitoring counts of jobs: each attempt, variant and verdict once, whatever becomes of the rows."""

from datetime import timedelta

import pytest
from sqlalchemy import delete, select

from optigpu.documents.result import Outcome
from optigpu.store import events, jobs, leases, outcomes, tallies
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.store.tables import Attempt, Job, JobEvent, VariantRow
from optigpu.store.tallies import Phase, Tally, TallyReader
from optigpu.vocabulary import DeviceKind, JobState, utc_now
from tests.service.records import a_failure, a_plan, a_result, a_spec, a_worker, an_outcome

CPU = DeviceKind.CPU


def read(database: Database, reader: TallyReader | None = None) -> Tally:
    with database.read() as session:
        return (reader or TallyReader()).read(session)


def claim(database: Database, lease_s: float = 60) -> Lease:
    with database.write() as session:
        jobs.submit(session, a_spec())
    with database.write() as session:
        lease = leases.claim(session, a_worker(), lease_s)
    assert lease is not None
    return lease


def finish(database: Database, *ended: Outcome) -> str:
    """A job that has gone through all of its phases."""
    lease = claim(database)
    with database.write() as session:
        outcomes.plan(session, lease, a_plan(*("variant" for _ in ended)))
        for outcome in ended:
            outcomes.variant_started(session, lease, outcome.index)
            outcomes.save_outcome(session, lease, outcome)
        outcomes.finish(session, lease, JobState.SUCCEEDED)
    return lease.job_id


def test_attempts_variants_and_verdicts_are_counted(database: Database) -> None:
    finish(database, an_outcome(a_result()), an_outcome(a_result(valid=False, index=1)), a_failure(2))
    claim(database)
    with database.write() as session:
        leases.sweep(session, utc_now() + timedelta(hours=1))
    tally = read(database)
    assert tally.attempts == {(CPU, "succeeded"): 1, (CPU, "lost"): 1}
    assert tally.variants == {(CPU, "succeeded"): 2, (CPU, "failed"): 1}
    assert tally.verdicts == {(CPU, "valid"): 1, (CPU, "invalid"): 1}
    assert tally.reasons == {"output_invalid": 1}


def test_each_phase_is_measured_from_the_job_s_own_times(database: Database) -> None:
    at = utc_now()
    finish(database, an_outcome(a_result()))
    with database.write() as session:
        job, attempt = session.scalars(select(Job)).one(), session.scalars(select(Attempt)).one()
        started = session.scalars(select(JobEvent).where(JobEvent.kind == "variant_started")).one()
        job.created_at, attempt.started_at = at, at + timedelta(seconds=4)
        started.at, attempt.ended_at = at + timedelta(seconds=14), at + timedelta(seconds=104)
    tally = read(database)
    assert tally.phase_s == {(Phase.QUEUED, CPU): 4, (Phase.PREPARING, CPU): 10, (Phase.MEASURING, CPU): 90}
    bounds = {each.phase: tallies.BOUNDS_S[each.bucket] for each in tally.phases}
    assert bounds == {Phase.QUEUED: 5.0, Phase.PREPARING: 15.0, Phase.MEASURING: 300.0}
    assert tally.busy_s == {"worker-1": 100}


def test_the_time_of_a_job_that_runs_counts_for_its_worker_and_for_no_attempt(database: Database) -> None:
    lease = claim(database)
    with database.write() as session:
        session.get_one(Attempt, (lease.job_id, 1)).started_at -= timedelta(minutes=10)
    tally = read(database)
    assert tally.busy_s["worker-1"] >= 600
    assert (tally.attempts, [each.phase for each in tally.phases]) == ({}, [Phase.QUEUED])


def test_what_is_settled_is_read_once_and_what_is_gone_stays_counted(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tallies, "COMMITTED_AFTER", timedelta(0))
    reader = TallyReader()
    finish(database, an_outcome(a_result()))
    first = read(database, reader)
    assert read(database, reader) == first == read(database)
    with database.write() as session:
        session.execute(delete(VariantRow))
        session.execute(delete(Job))
    assert read(database, reader) == first
    finish(database, an_outcome(a_result()))
    assert read(database, reader).attempts == {(CPU, "succeeded"): 2}


def test_a_job_that_is_older_than_an_unfinished_one_waits_to_be_settled(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tallies, "COMMITTED_AFTER", timedelta(0))
    reader = TallyReader()
    lease = claim(database)
    finish(database, an_outcome(a_result()))
    assert read(database, reader).attempts == {(CPU, "succeeded"): 1}
    with database.write() as session:
        outcomes.finish(session, lease, JobState.CANCELLED)
    assert read(database, reader).attempts == {(CPU, "succeeded"): 1, (CPU, "cancelled"): 1}
    with database.read() as session:
        assert events.head(session, lease.job_id).ended
