"""Jobs: submitted once, listed in order, cancelled whenever."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from optigpu.documents.views import ProgressView
from optigpu.store import events, jobs, leases, outcomes, workers
from optigpu.store.database import Database
from optigpu.vocabulary import ConflictError, DeviceKind, JobState, is_id
from tests.service.records import a_spec, a_worker


def test_a_submitted_job_is_queued_with_its_whole_spec(database: Database) -> None:
    spec = a_spec(seed=7, limits={"timeout_s": 60.0})
    with database.write() as session:
        submitted = jobs.submit(session, spec)
    with database.read() as session:
        job = jobs.get(session, submitted.job.id)
    assert submitted.created
    assert submitted.job == job.model_copy(update={"queue_position": None}), (
        "its place is looked up by who asks"
    )
    assert is_id(job.id)
    assert (job.state, job.workload, job.device) == (JobState.QUEUED, "matmul", DeviceKind.CPU)
    assert job.spec == spec.model_dump(mode="json")
    assert (job.queue_position, job.attempts, job.variants) == (1, (), ())


def test_any_text_can_be_a_key(database: Database) -> None:
    with database.write() as session:
        for key in ("", "x" * 10_000, "\U0001f680"):
            assert jobs.submit(session, a_spec(), idempotency_key=key).created


def test_twins_that_come_at_once_create_one_job(database: Database) -> None:
    together = Barrier(8)

    def post(_: int) -> tuple[str, bool]:
        together.wait()
        with database.write() as session:
            submitted = jobs.submit(session, a_spec(), idempotency_key="key")
        return submitted.job.id, submitted.created

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(8)))
    assert len({job_id for job_id, _ in answers}) == 1
    assert sum(created for _, created in answers) == 1


def test_a_list_can_be_of_one_tag(database: Database) -> None:
    """Whole tags: no part of one is found, and no character of one is a wildcard."""
    with database.write() as session:
        paper = jobs.submit(session, a_spec(tags=["paper", "zen_4"])).job.id
        draft = jobs.submit(session, a_spec(tags=["paper-draft", "zen54"])).job.id
        jobs.submit(session, a_spec())
        found = {
            tag: [job.id for job in jobs.list_(session, tag=tag).jobs]
            for tag in ("paper", "zen_4", "zen54", "pape")
        }
    assert found == {"paper": [paper], "zen_4": [paper], "zen54": [draft], "pape": []}


def test_the_queue_position_counts_what_waits_for_the_same_device(database: Database) -> None:
    with database.write() as session:
        cpu = [jobs.submit(session, a_spec()).job.id for _ in range(3)]
        cuda = jobs.submit(session, a_spec(device="cuda")).job.id
        leases.claim(session, a_worker(), 30)
        positions = [jobs.get(session, job_id).queue_position for job_id in (*cpu, cuda)]
    assert positions == [None, 1, 2, 1]


def test_a_queued_job_is_cancelled_at_once_and_only_once(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        cancelled = jobs.request_cancel(session, job_id)
    with database.write() as session:
        assert jobs.request_cancel(session, job_id) == cancelled
        assert leases.claim(session, a_worker(), 30) is None
    assert cancelled.state is JobState.CANCELLED
    assert cancelled.cancel_requested_at is not None
    assert cancelled.reason == "Cancelled on request, before it began."
    with database.read() as session:
        assert [event.kind for event in events.after(session, job_id, 0)] == [
            "state",
            "cancel_requested",
            "state",
        ]


def test_a_running_job_runs_on_until_its_worker_says_that_it_has_stopped(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = leases.claim(session, a_worker(), 30)
        assert lease is not None
        assert leases.heartbeat(session, lease, 30) is False
        assert jobs.request_cancel(session, job_id).state is JobState.RUNNING
        assert leases.heartbeat(session, lease, 30) is True
        outcomes.finish(session, lease, JobState.CANCELLED, "Cancelled on request.")
        assert jobs.get(session, job_id).state is JobState.CANCELLED


def test_a_job_that_has_ended_stays_as_it_is(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = leases.claim(session, a_worker(), 30)
        assert lease is not None
        outcomes.finish(session, lease, JobState.SUCCEEDED)
        ended = jobs.get(session, job_id)
        assert jobs.request_cancel(session, job_id) == ended


def test_events_count_without_gaps_when_many_write_at_once(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id

    def write(number: int) -> int:
        with database.write() as session:
            return events.append(session, job_id, "note", {"number": number})

    with ThreadPoolExecutor(8) as pool:
        given = sorted(pool.map(write, range(40)))
    with database.read() as session:
        stored = events.after(session, job_id, 0)
        assert given == list(range(2, 42))
        assert [event.sequence for event in stored] == list(range(1, 42))
        assert events.after(session, job_id, 38) == stored[38:]
        assert events.after(session, job_id, 0, limit=2) == stored[:2]


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_the_progress_of_a_job_that_has_ended_is_whole(database: Database, state: JobState) -> None:
    """However it ended: an ended job has nothing to come."""
    with database.write() as session:
        jobs.submit(session, a_spec())
        workers.register(session, a_worker())
        lease = leases.claim(session, a_worker(), lease_s=60)
        assert lease is not None
        leases.heartbeat(session, lease, 60, ProgressView(fraction=0.4, doing="measuring", remaining_s=60))
        assert jobs.get(session, lease.job_id).progress.fraction == 0.4
        outcomes.finish(session, lease, state, "As told.")
        ended = jobs.get(session, lease.job_id).progress
    assert (ended.fraction, ended.doing, ended.remaining_s) == (1.0, None, 0.0)


def test_jobs_that_are_posted_at_once_have_answers_of_their_own(database: Database) -> None:
    posts = [
        jobs.Post(a_spec(), idempotency_key="b"),
        jobs.Post(a_spec(), idempotency_key="a"),
        jobs.Post(a_spec(), idempotency_key="b"),
        jobs.Post(a_spec(seed=7), idempotency_key="b"),
        jobs.Post(a_spec()),
    ]
    with database.write() as session:
        one, other, same, conflict, plain = jobs.submit_all(session, posts)
    assert isinstance(conflict, ConflictError)
    assert isinstance(one, jobs.Submitted)
    assert isinstance(other, jobs.Submitted)
    assert isinstance(same, jobs.Submitted)
    assert isinstance(plain, jobs.Submitted)
    assert [answer.created for answer in (one, other, same, plain)] == [True, True, False, True]
    assert same.job.id == one.job.id
    with database.read() as session:
        stored = {job.id for job in jobs.list_(session).jobs}
    assert stored == {one.job.id, other.job.id, plain.job.id}
