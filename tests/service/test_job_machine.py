"""The state machine of jobs under random histories: two workers, stale leases, lost workers, requests to cancel.

A model in this file says what each call may do; after each call the database must agree with it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.views import ProgressView
from optigpu.store import jobs, leases, outcomes
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.store.tables import Attempt, Job, JobEvent, ResultRow
from optigpu.vocabulary import JobState, LeaseLostError, utc_now
from tests.breadth import long
from tests.service.conftest import empty
from tests.service.records import a_plan, a_result, a_spec, a_worker, an_outcome

LEASE_S = 30.0
WORKERS = (a_worker("one"), a_worker("two", host_id="host-2"))
NEXT = {
    JobState.QUEUED: {JobState.RUNNING, JobState.CANCELLED},
    JobState.RUNNING: {JobState.QUEUED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED},
}
"""The states that may follow one; none follows a final one."""
MOST_LOSSES = 3
AFTER_LOSSES_S = {2: 30}
"""A job that has lost this many workers waits so long for the next one."""
EXAMPLES = [("sqlite", 6, 40), *map(long, (("sqlite", 30, 40), ("postgresql", 6, 30)))]
"""On which database how many histories, and their most steps: each step is a transaction or two."""


class JobMachine(RuleBasedStateMachine):
    """Calls of the store in any order.

    The model: `holders` has the lease of each job that runs, `losses` counts its lost workers, `due` has when a queued
    job may begin, `writes` counts written progress, `saved` has the ids of each job's results, `states` and `ends` what
    was last seen.
    """

    posted = Bundle("posted")
    taken = Bundle("taken")

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.now = utc_now()
        self.holders: dict[str, Lease] = {}
        self.losses: Counter[str] = Counter()
        self.due: dict[str, datetime] = {}
        self.saved: dict[str, set[str]] = {}
        self.writes: Counter[str] = Counter()
        self.states: dict[str, JobState] = {}
        self.ends: dict[str, tuple[object, ...]] = {}
        empty(database)

    @rule(target=posted, key=st.sampled_from(["a", "b", None]))
    def submit(self, key: str | None) -> str:
        """With the key of an earlier job it is that one."""
        with self.database.write() as session:
            return jobs.submit(session, a_spec(), idempotency_key=key).job.id

    @rule(target=taken, worker=st.sampled_from(WORKERS))
    def claim(self, worker: Any) -> Lease | MultipleResults[Lease]:
        with self.database.write() as session:
            lease = leases.claim(session, worker, LEASE_S, self.now)
        queued = [job_id for job_id, state in self.states.items() if state is JobState.QUEUED]
        waiting = [job_id for job_id in queued if self.due.get(job_id, self.now) <= self.now]
        if lease is None:
            assert not waiting
            return multiple()
        assert lease.job_id in waiting, "only what was queued can be claimed"
        self.holders[lease.job_id] = lease
        return lease

    @rule(lease=taken)
    def heartbeat(self, lease: Lease) -> None:
        progress = ProgressView(fraction=0.5, remaining_s=float(sum(self.writes.values())))
        with self.as_holder(lease) as session:
            leases.heartbeat(session, lease, LEASE_S, progress, self.now)
            self.writes[lease.job_id] += 1

    @rule(lease=taken)
    def measure(self, lease: Lease) -> None:
        """Plans one variant and saves its outcome, twice: a worker repeats a write of which it got no answer."""
        with self.as_holder(lease) as session:
            outcomes.plan(session, lease, a_plan("one"))
            if 0 not in lease.done:
                result_id = f"{lease.job_id[:-4]}{lease.fencing:04d}"
                for _ in range(2):
                    outcomes.save_outcome(session, lease, an_outcome(a_result(id=result_id)))
                self.saved.setdefault(lease.job_id, set()).add(result_id)

    @rule(lease=taken, state=st.sampled_from([JobState.SUCCEEDED, JobState.FAILED]))
    def finish(self, lease: Lease, state: JobState) -> None:
        """Of a job that ended so under the same lease it may be said again, and changes nothing."""
        ended = self.ends.get(lease.job_id)
        if ended is not None and (ended[0], ended[-1]) == (state, lease.fencing):
            with self.database.write() as session:
                outcomes.finish(session, lease, state)
            return
        with self.as_holder(lease) as session:
            outcomes.finish(session, lease, state)
            del self.holders[lease.job_id]

    @rule(lease=taken)
    def release(self, lease: Lease) -> None:
        with self.as_holder(lease) as session:
            leases.release(session, lease)
            del self.holders[lease.job_id]

    @rule(job_id=posted)
    def cancel(self, job_id: str) -> None:
        with self.database.write() as session:
            state = jobs.request_cancel(session, job_id).state
        before = self.states[job_id]
        assert state is (JobState.CANCELLED if before is JobState.QUEUED else before)

    @rule(seconds=st.sampled_from([60, 20]))
    def wait_and_sweep(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)
        with self.database.write() as session:
            swept = leases.sweep(session, self.now)
        for job_id in (*swept.requeued, *swept.failed, *swept.cancelled):
            del self.holders[job_id]
        for job_id in (*swept.requeued, *swept.failed):
            self.losses[job_id] += 1
            self.due[job_id] = self.now + timedelta(seconds=AFTER_LOSSES_S.get(self.losses[job_id], 0))
        assert {job_id for job_id in swept.failed if self.losses[job_id] != MOST_LOSSES} == set()
        assert {job_id for job_id in swept.requeued if self.losses[job_id] >= MOST_LOSSES} == set()

    @rule(target=taken, worker=st.sampled_from(WORKERS))
    def lose_and_claim(self, worker: Any) -> Lease | MultipleResults[Lease]:
        """Every lease runs out and a worker claims at once, so that the one before is stale while the job runs."""
        self.wait_and_sweep(60)
        self.states_follow_each_other()
        return self.claim(worker)

    @contextmanager
    def as_holder(self, lease: Lease) -> Iterator[Session]:
        """A write that must be accepted from the holder, and from nobody else."""
        holds = self.holders.get(lease.job_id) == lease
        try:
            with self.database.write() as session:
                yield session
        except LeaseLostError:
            assert not holds
        else:
            assert holds, "a stale lease has written"

    @invariant()
    def states_follow_each_other(self) -> None:
        for job in self.read(lambda session: session.scalars(select(Job)).all()):
            before = self.states.get(job.id, JobState.QUEUED)
            assert job.state is before or job.state in NEXT.get(before, set()), (before, job.state)
            self.states[job.id] = job.state
            end = (job.state, job.ended_at, job.reason, job.attempt, job.fencing)
            if job.state.is_final:
                assert self.ends.setdefault(job.id, end) == end, "a job that has ended does not change"

    @invariant()
    def one_worker_holds_a_running_job(self) -> None:
        running = self.read(
            lambda session: session.scalars(select(Job).where(Job.state == JobState.RUNNING)).all()
        )
        assert {(job.id, job.worker_id, job.fencing, job.attempt) for job in running} == {
            (lease.job_id, lease.worker_id, lease.fencing, lease.attempt) for lease in self.holders.values()
        }
        open_attempts = select(Attempt.job_id, Attempt.number).where(Attempt.ended_at.is_(None))
        assert {tuple(row) for row in self.read(lambda session: session.execute(open_attempts).all())} == {
            (lease.job_id, lease.attempt) for lease in self.holders.values()
        }

    @invariant()
    def events_are_numbered_without_gaps(self) -> None:
        """Newer progress replaces older; every other event stays."""
        for job in self.read(lambda session: session.scalars(select(Job)).all()):
            query = select(JobEvent.sequence, JobEvent.kind).where(JobEvent.job_id == job.id)
            told = {
                row.sequence: row.kind for row in self.read(lambda session, q=query: session.execute(q).all())
            }
            replaced = max(0, self.writes[job.id] - 1)
            assert max(told) == job.last_sequence == len(told) + replaced
            assert min(told) == 1
            assert Counter(told.values())["progressed"] == min(1, self.writes[job.id])

    @invariant()
    def each_result_is_stored_once(self) -> None:
        query = select(ResultRow.job_id, ResultRow.id)
        found = self.read(lambda session: session.execute(query).all())
        assert Counter(tuple(row) for row in found) == Counter(
            (job_id, result_id) for job_id, ids in self.saved.items() for result_id in ids
        )

    def read(self, query: Callable[..., Any]) -> Any:
        with self.database.read() as session:
            return query(session)


@pytest.mark.slow
@pytest.mark.parametrize(("database", "examples", "steps"), EXAMPLES, indirect=["database"])
def test_no_history_breaks_the_state_machine(database: Database, examples: int, steps: int) -> None:
    machine: Any = partial(JobMachine, database)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
