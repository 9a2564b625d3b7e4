"""Leases: each job to one worker that can run it; what was lost is written to no more, and goes on elsewhere."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

import migrations
from optigpu.documents.events import Waiting
from optigpu.documents.result import Attribution, Samples
from optigpu.documents.views import ProgressView
from optigpu.store import events, jobs, leases, outcomes, results
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.store.tables import Job
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import DeviceKind, FailureKind, JobState, LeaseLostError, VariantStatus, utc_now
from tests.breadth import spread
from tests.service.records import (
    a_failure,
    a_gpu_worker,
    a_plan,
    a_result,
    a_spec,
    a_worker,
    an_outcome,
    claimed,
)

JOBS = 40
LATER = timedelta(hours=1)
FIRST = a_worker("first")
FIRST_GPU = a_gpu_worker("first")


def _processes(count: int) -> Executor:
    """Forked from a process that has imported what they need, and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(count, mp_context=context)


def _claim_all(url: str, name: str) -> list[str]:
    database = Database(url)
    taken = []
    while True:
        with database.write() as session:
            lease = leases.claim(session, a_worker(name), 300)
        if lease is None:
            break
        taken.append(lease.job_id)
    database.close()
    return taken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "workers"),
    [
        pytest.param(ThreadPoolExecutor, 4, id="threads"),
        pytest.param(_processes, 3, id="processes", marks=pytest.mark.long),
    ],
)
def test_workers_take_each_of_many_jobs_once(
    database_url: str, pool: Callable[[int], Executor], workers: int
) -> None:
    migrations.upgrade(database_url)
    database = Database(database_url)
    with database.write() as session:
        posted = {jobs.submit(session, a_spec()).job.id for _ in range(JOBS)}
    database.close()
    with pool(workers) as racing:
        names = [f"worker-{i}" for i in range(workers)]
        taken = list(racing.map(_claim_all, [database_url] * workers, names))
    flat = [job_id for one in taken for job_id in one]
    assert len(flat) == JOBS
    assert set(flat) == posted


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({"device": "cuda"}, True),
        ({"device": "cuda", "target": {"gpu": "h200"}}, True),
        ({"device": "cuda", "target": {"gpu": "H100"}}, False),
        ({"device": "cuda", "target": {"gpu": "%"}}, False),
        ({"device": "cuda", "target": {"min_vram_bytes": 141 * 10**9}}, True),
        ({"device": "cuda", "target": {"min_vram_bytes": 141 * 10**9 + 1}}, False),
    ],
)
def test_a_worker_takes_what_it_can_run(database: Database, changes: dict, can: bool) -> None:
    with database.write() as session:
        jobs.submit(session, a_spec(**changes))
        assert (leases.claim(session, a_gpu_worker(), 30) is not None) == can


def test_a_job_that_cannot_be_read_any_more_fails_and_the_next_is_taken(database: Database) -> None:
    with database.write() as session:
        first, second = (jobs.submit(session, a_spec()).job.id for _ in range(2))
        old = session.get_one(Job, first)
        old.spec = old.spec | {"workload": {"kind": "retired"}}
        assert claimed(session).job_id == second
        job = jobs.get(session, first)
    assert job.state is JobState.FAILED
    assert job.reason is not None
    assert job.reason.startswith("This version can no longer run the job (workload")
    assert job.attempts[0].outcome == "failed"


def test_progress_does_not_accumulate_and_its_sequence_grows(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = claimed(session)
        leases.heartbeat(session, lease, 30, ProgressView(fraction=0.0))
        outcomes.plan(session, lease, a_plan("baseline"))
        sequences = []
        for step in range(1, 51):
            leases.heartbeat(session, lease, 30, ProgressView(fraction=step / 50))
            *before, newest = events.after(session, job_id, 0)
            assert [event.kind for event in before] == ["state", "state", "planned"]
            assert (newest.kind, newest.data["fraction"]) == ("progressed", step / 50)
            sequences.append(newest.sequence)
    assert sequences == list(range(5, 55))


WRITES: dict[str, Callable[[Session, Lease], object]] = {
    "heartbeat": lambda s, lease: leases.heartbeat(s, lease, 30, ProgressView(fraction=0.9)),
    "plan": lambda s, lease: outcomes.plan(s, lease, a_plan("stale")),
    "waiting": lambda s, lease: outcomes.note(s, lease, Waiting(doing="cc1plus uses it", up_to_s=60)),
    "variant_started": lambda s, lease: outcomes.variant_started(s, lease, 0),
    "save_outcome": lambda s, lease: outcomes.save_outcome(s, lease, an_outcome(a_result())),
    "finish": lambda s, lease: outcomes.finish(
        s, lease, JobState.SUCCEEDED, attribution=Attribution(metric="tflops", rows=())
    ),
    "release": lambda s, lease: leases.release(s, lease),
}
SINCE = ["queued again", "claimed by another", "finished by another"]


@pytest.mark.parametrize(("write", "since"), spread(list(WRITES), SINCE, by_default=len(WRITES)))
def test_a_worker_that_lost_its_lease_writes_nothing(database: Database, write: str, since: str) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        stale = claimed(session)
        leases.sweep(session, now=utc_now() + LATER)
        if since != "queued again":
            current = claimed(session, a_worker("worker-2"))
            outcomes.plan(session, current, a_plan("baseline"))
            if since == "finished by another":
                outcomes.finish(session, current, JobState.SUCCEEDED)
        before = _everything(session, job_id)
    with pytest.raises(LeaseLostError, match=job_id), database.write() as session:
        WRITES[write](session, stale)
    with database.read() as session:
        assert _everything(session, job_id) == before


def test_an_expired_job_is_taken_up_again_until_it_was_lost_too_often(database: Database) -> None:
    now = utc_now()
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        for fencing in (1, 2):
            assert claimed(session, now=now).fencing == fencing
            now += LATER
            assert leases.sweep(session, now=now) == leases.Swept(requeued=(job_id,))
            assert jobs.get(session, job_id).started_at is None
            now += LATER
        claimed(session, now=now)
        assert leases.sweep(session, now=now + LATER) == leases.Swept(failed=(job_id,))
        job = jobs.get(session, job_id)
    assert (
        job.reason
        == "Its worker was lost 3 times: it died, hung or lost its connection. Read the worker's log."
    )
    assert [attempt.outcome for attempt in job.attempts] == ["lost", "lost", "failed"]
    assert (job.parked, job.failure) == (True, FailureKind.LOST)


def test_the_next_attempt_is_given_the_outcomes_of_the_one_before(database: Database) -> None:
    """With raw samples, so that its attribution covers them; a reason where there is no result."""
    result = a_result()
    samples: dict[str, Samples] = {"tokens_per_s": ((10.0, 11.0), (12.0,))}
    with database.write() as session:
        jobs.submit(session, a_spec())
        lease = claimed(session)
        outcomes.plan(session, lease, a_plan("baseline", "bf16", "int8"))
        outcomes.save_outcome(session, lease, an_outcome(result, samples))
        outcomes.save_outcome(session, lease, a_failure(index=2))
        assert outcomes.earlier(session, lease) == {}
        leases.sweep(session, now=utc_now() + LATER)
        again = claimed(session, a_worker("worker-2"))
        found = outcomes.earlier(session, again)
    stored = result.model_copy(update={"job_id": lease.job_id})
    assert found == {0: an_outcome(stored, samples), 2: a_failure(index=2)}


def test_variants_that_were_not_measured_say_why(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = claimed(session)
        outcomes.plan(session, lease, a_plan("baseline", "bf16"))
        outcomes.variant_started(session, lease, 0)
        outcomes.finish(session, lease, JobState.FAILED, "The worker failed.")
        variants = jobs.get(session, job_id).variants
    assert [(variant.status, variant.reason) for variant in variants] == [
        (VariantStatus.CANCELLED, "The worker failed.")
    ] * 2


def _everything(session: Session, job_id: str) -> tuple:
    return jobs.get(session, job_id), events.after(session, job_id, 0), results.of_job(session, job_id)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        pytest.param(FIRST, a_worker("second"), True, id="same CPU"),
        pytest.param(FIRST, a_worker("second", host_id="host-2"), False, id="another host"),
        pytest.param(FIRST, a_worker("second", version="0.2.0"), False, id="another version"),
        pytest.param(FIRST, a_worker("second", hardware_class="Test CPU 2 cores"), False, id="fewer cores"),
        pytest.param(FIRST_GPU, a_gpu_worker("second"), True, id="same GPU"),
        pytest.param(FIRST_GPU, a_gpu_worker("second", gpu_uuid="GPU-b"), False, id="another GPU"),
        pytest.param(
            FIRST_GPU.model_copy(update={"gpu_uuid": "MIG-a"}), FIRST_GPU, False, id="part of the same GPU"
        ),
    ],
)
def test_a_job_resumes_only_on_the_same_device(
    database: Database, first: WorkerInfo, second: WorkerInfo, kept: bool
) -> None:
    """Elsewhere the earlier outcomes are dropped: a ladder must not compare two devices."""
    with database.write() as session:
        job_id = jobs.submit(session, a_spec(device=first.device)).job.id
        lease = claimed(session, first)
        outcomes.plan(session, lease, a_plan("baseline", "bf16"))
        outcomes.save_outcome(session, lease, an_outcome(a_result(device=first.device)))
        leases.sweep(session, now=utc_now() + LATER)
        again = claimed(session, second)
        outcomes.plan(session, again, a_plan("baseline", "bf16"))
        statuses = [variant.status for variant in jobs.get(session, job_id).variants]
        found = results.of_job(session, job_id)
    baseline = VariantStatus.SUCCEEDED if kept else VariantStatus.PENDING
    assert again.done == ((0,) if kept else ())
    assert statuses == [baseline, VariantStatus.PENDING]
    assert len(found) == kept


def test_what_a_third_device_measures_is_not_mixed_with_the_first(database: Database) -> None:
    """A, then B, then A again: what A measured was dropped when B began, so it does not come back."""
    with database.write() as session:
        job_id = jobs.submit(session, a_spec(device="cuda")).job.id
        for gpu in ("GPU-a", "GPU-b", "GPU-a"):
            lease = claimed(session, a_gpu_worker(gpu_uuid=gpu))
            assert lease.done == ()
            outcomes.plan(session, lease, a_plan("baseline"))
            outcomes.save_outcome(session, lease, an_outcome(a_result(device=DeviceKind.CUDA)))
            leases.release(session, lease)
        assert len(results.of_job(session, job_id)) == 1
