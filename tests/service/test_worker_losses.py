"""What a worker may lose while it works: the lease of its job, and its device."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.views import ProgressView, WorkerView
from optigpu.hardware import probe
from optigpu.hardware.device_kinds import KINDS
from optigpu.store import events, jobs, leases, workers
from optigpu.store.database import Database, default_url
from optigpu.store.leases import Lease
from optigpu.store.tables import Job
from optigpu.vocabulary import DeviceKind, FailureKind, JobState, UnsupportedError, utc_now
from tests.breadth import cases
from tests.engine.processes import children, program
from tests.servers.databases import fresh_database
from tests.service.processes import eventually, watched_processes
from tests.service.receiver import Gate, gate_to
from tests.service.serving import look, matmul, migrated, submit, worker_context, working
from worker.capabilities import serving
from worker.context import WorkerContext
from worker.execute import execute_next
from worker.heartbeat import Heartbeat, Interruption, StoredJob

pytestmark = pytest.mark.slow

LEASE_S = 3.0
MOMENT = timedelta(milliseconds=1)
ON_ONE_ENGINE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
"""For faults that no database sees."""
LOST = "RuntimeError: No CUDA GPUs are available"
BROKEN_TORCH = "raise RuntimeError('No CUDA GPUs are available')\n"
UNSUPPORTED: dict[str, Any] = {"dtypes": ("tf32",)}
"""What a CPU has not: every variant is unsupported, and the job fails."""


@pytest.fixture(autouse=True)
def frequent_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.heartbeat.BEAT_S", 0.05)


def claimed(context: WorkerContext) -> Heartbeat:
    submit(context.database, matmul())
    before = time.monotonic()
    lease = context.write(lambda session: leases.claim(session, context.info, context.settings.lease_s))
    assert lease is not None
    return Heartbeat(StoredJob(context, lease), context.settings.lease_s, before)


def only_job(database: Database) -> str:
    with database.read() as session:
        return jobs.list_(session).jobs[0].id


def cancel(database: Database) -> None:
    job_id = only_job(database)
    with database.write() as session:
        jobs.request_cancel(session, job_id)


def lease_end(database: Database) -> datetime:
    with database.read() as session:
        until = session.scalars(select(Job.lease_until)).one()
    assert until is not None
    return until


def requeued(database: Database, at: datetime) -> tuple[str, ...]:
    with database.write() as session:
        return leases.sweep(session, at).requeued


def test_a_lease_is_extended_for_as_long_as_the_block_lasts(database: Database) -> None:
    with claimed(worker_context(database)) as heartbeat:
        first = lease_end(database)
        assert eventually(lambda: lease_end(database) > first, within_s=10)
        assert heartbeat.interruption() is None
        assert requeued(database, first + MOMENT) == ()
    last = lease_end(database)
    time.sleep(0.2)
    assert lease_end(database) == last
    assert requeued(database, last + MOMENT) == (only_job(database),)


def test_a_request_to_cancel_is_learned(database: Database) -> None:
    context = worker_context(database)
    with claimed(context) as heartbeat:
        cancel(database)
        assert eventually(heartbeat.interruption, within_s=10) is Interruption.CANCELLED


def test_a_job_that_was_taken_back_is_lost(database: Database) -> None:
    context = worker_context(database)
    with claimed(context) as heartbeat:
        context.write(lambda session: leases.sweep(session, utc_now() + timedelta(hours=1)))
        assert eventually(heartbeat.interruption, within_s=10) is Interruption.LEASE_LOST
    assert look(database, only_job(database)).state is JobState.QUEUED


def test_progress_is_written_by_the_next_beat_and_only_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[ProgressView | None] = []
    beat = leases.heartbeat

    def counted(session: Session, lease: Lease, lease_s: float, progress: ProgressView | None) -> bool:
        asked = beat(session, lease, lease_s, progress)
        beats.append(progress)
        return asked

    monkeypatch.setattr(leases, "heartbeat", counted)
    half = ProgressView(fraction=0.5, doing="measuring", remaining_s=1.0)
    with claimed(worker_context(database)) as heartbeat:
        heartbeat.report(ProgressView(fraction=0.1))
        heartbeat.report(half)
        assert eventually(lambda: beats.count(half) >= 4, within_s=10)
    assert look(database, only_job(database)).progress == half
    with database.read() as session:
        assert events.head(session, only_job(database)).sequence == 3  # queued, running, progressed


def test_an_unexpected_error_of_a_beat_is_logged_and_the_next_one_beats(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [ValueError("not the database"), TypeError("nor this")]
    beat = leases.heartbeat

    def sometimes(*arguments: Any) -> bool:
        if errors:
            raise errors.pop()
        return beat(*arguments)

    monkeypatch.setattr(leases, "heartbeat", sometimes)
    half = ProgressView(fraction=0.5)
    with claimed(worker_context(database)) as heartbeat:
        heartbeat.report(half)
        assert eventually(lambda: look(database, only_job(database)).progress == half, within_s=10)
        assert heartbeat.interruption() is None
    for text in ("heartbeat.failed", "TypeError: nor this", "ValueError: not the database"):
        assert text in caplog.text


def broken(*_: Any) -> bool:
    raise TypeError("a fault of our own")


@ON_ONE_ENGINE
def test_a_job_whose_lease_cannot_be_extended_for_an_unexpected_error_stops_with_a_reason(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the lease still holds, so that the job can be ended and is not taken for lost."""

    def run_until_told_to_stop(*_: Any, cancelled: Callable[[], str | None], **__: Any) -> None:
        while cancelled() is None:
            time.sleep(0.01)

    monkeypatch.setattr("worker.execute.run", run_until_told_to_stop)
    monkeypatch.setattr(leases, "heartbeat", broken)
    context = worker_context(database, lease_s=LEASE_S)
    submit(database, matmul())
    assert execute_next(context)
    job = look(database, only_job(database))
    assert (job.state, job.reason) == (JobState.FAILED, Interruption.NOT_EXTENDED.value)
    assert "log" in (job.reason or "")


@pytest.fixture
def gate(postgres_server_url: str) -> Iterator[Gate]:
    """A door in front of a migrated PostgreSQL database; open."""
    with fresh_database(postgres_server_url) as url, migrated(url), gate_to(url, 5432) as gate:
        gate.open()
        yield gate


def test_a_lease_survives_a_database_that_comes_back_in_time(gate: Gate) -> None:
    context = worker_context(Database(gate.url), lease_s=8)
    with closing(context.database), claimed(context) as heartbeat:
        gate.shut()
        time.sleep(1)
        assert heartbeat.interruption() is None
        gate.open()
        cancel(context.database)
        assert eventually(heartbeat.interruption, within_s=6) is Interruption.CANCELLED


def test_a_lease_that_cannot_be_extended_counts_as_lost_when_it_is_over(gate: Gate) -> None:
    context = worker_context(Database(gate.url), lease_s=LEASE_S)
    with closing(context.database), claimed(context) as heartbeat:
        gate.shut()
        assert eventually(heartbeat.interruption, within_s=10) is Interruption.DATABASE_AWAY


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Locks and data of this test alone."""
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))


@pytest.fixture
def own_database(tmp_path: Path) -> Iterator[Database]:
    with migrated(default_url(tmp_path)) as own_database:
        yield own_database


@pytest.mark.usefixtures("forked_children")
def test_after_a_failure_a_device_that_is_gone_fails_no_other_job(own_database: Database) -> None:
    first, second = submit(own_database, matmul(**UNSUPPORTED)), submit(own_database, matmul())
    context = worker_context(own_database)
    context.proof = program("unproven", "breaks", LOST)
    assert execute_next(context)
    job = look(own_database, first)
    assert (job.state, context.in_doubt) == (JobState.FAILED, True)
    assert job.reason == f"Nothing was measured: {job.variants[0].reason}"
    assert not execute_next(context)
    assert context.stopping.asked
    assert (context.lost or "").startswith("torch finds no GPU")
    assert look(own_database, second).state is JobState.QUEUED


@pytest.mark.usefixtures("forked_children")
def test_after_a_failure_a_device_that_works_goes_on(own_database: Database) -> None:
    submit(own_database, matmul(**UNSUPPORTED))
    second = submit(own_database, matmul())
    context = worker_context(own_database)
    assert execute_next(context)
    assert execute_next(context), "the real proof, on this machine's CPU"
    assert (look(own_database, second).state, context.in_doubt) == (JobState.SUCCEEDED, False)


@pytest.mark.usefixtures("forked_children")
def test_a_worker_that_is_to_stop_while_it_proves_its_device_has_lost_nothing(own_database: Database) -> None:
    context = worker_context(own_database)
    context.in_doubt, context.proof = True, program("unproven", "hangs")
    before = children()
    with working(context):
        assert eventually(lambda: children() - before)
    assert (context.lost, context.in_doubt) == (None, True)


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("mode", cases(["embedded", "service"], by_default=1))
def test_a_worker_whose_device_is_gone_ends_with_a_sentence(
    own_database: Database, tmp_path: Path, redis_url: str, mode: str
) -> None:
    """Its torch breaks while it runs, as it does when a driver is updated under it."""
    later = tmp_path / "later"
    later.mkdir()
    variables = {
        "OPTIGPU_DATA_DIR": str(tmp_path),
        "OPTIGPU_POLL_S": "0.2",
        "OPTIGPU_SWEEP_S": "0.5",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(later), os.environ.get("PYTHONPATH")))),
    }
    if mode == "service":
        variables["OPTIGPU_REDIS_URL"] = redis_url
    with watched_processes(tmp_path, variables) as processes:
        worker = processes.start("worker", "--device", "cpu")
        assert eventually(lambda: registered(own_database))
        (later / "torch.py").write_text(BROKEN_TORCH)
        first, second = submit(own_database, matmul()), submit(own_database, matmul())
        assert worker.wait(90) == 1
        said = [line for line in processes.printed().splitlines() if line.startswith("python -m worker: ")]
    assert [line.partition(", although")[0] for line in said] == ["python -m worker: torch finds no GPU"]
    assert [look(own_database, job_id).state for job_id in (first, second)] == [JobState.QUEUED] * 2
    assert look(own_database, first).failure is FailureKind.DEVICE_LOST
    assert not registered(own_database)


def registered(own_database: Database) -> list[WorkerView]:
    with own_database.read() as session:
        return workers.list_(session)


ABSENT = {device for device in (DeviceKind.ROCM, DeviceKind.XPU, DeviceKind.MPS) if not probe().has(device)}


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("device", sorted(ABSENT))
def test_a_worker_for_a_gpu_that_is_not_there_says_which(device: DeviceKind, tmp_path: Path) -> None:
    title = KINDS[device].title
    with (
        pytest.raises(
            UnsupportedError, match=f"no {title} that works .*; start the worker with --device cpu"
        ),
        serving(device, tmp_path),
    ):
        pass
