"""A device that stops working: the worker notices, stops, and leaves the other jobs to workers that can measure."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.views import WorkerView
from optigpu.hardware import probe
from optigpu.hardware.device_kinds import KINDS
from optigpu.store import workers
from optigpu.store.database import Database, default_url
from optigpu.vocabulary import DeviceKind, FailureKind, JobState, UnsupportedError
from tests.engine.processes import children, program
from tests.service.processes import eventually, watched_processes
from tests.service.workers import look, matmul, migrated, submit, worker_context, working
from worker.capabilities import serving
from worker.execute import execute_next

LOST = "RuntimeError: No CUDA GPUs are available"
BROKEN_TORCH = "raise RuntimeError('No CUDA GPUs are available')\n"
pytestmark = pytest.mark.usefixtures("forked_children")
UNSUPPORTED: dict[str, Any] = {"dtypes": ("tf32",)}
"""What a CPU has not: every variant is unsupported, and the job fails."""


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Locks and data of this test alone."""
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with migrated(default_url(tmp_path)) as database:
        yield database


@pytest.mark.slow
def test_after_a_failure_a_device_that_is_gone_fails_no_other_job(database: Database) -> None:
    first, second = submit(database, matmul(**UNSUPPORTED)), submit(database, matmul())
    context = worker_context(database)
    context.proof = program("unproven", "breaks", LOST)
    assert execute_next(context)
    assert (look(database, first).state, context.in_doubt) == (JobState.FAILED, True)
    assert not execute_next(context)
    assert context.stopping.asked
    assert (context.lost or "").startswith("torch finds no GPU")
    assert look(database, second).state is JobState.QUEUED


@pytest.mark.slow
def test_after_a_failure_a_device_that_works_goes_on(database: Database) -> None:
    submit(database, matmul(**UNSUPPORTED))
    second = submit(database, matmul())
    context = worker_context(database)
    assert execute_next(context)
    assert execute_next(context), "the real proof, on this machine's CPU"
    assert (look(database, second).state, context.in_doubt) == (JobState.SUCCEEDED, False)


@pytest.mark.slow
def test_a_job_that_succeeds_asks_for_no_proof(database: Database) -> None:
    for _ in range(2):
        submit(database, matmul())
    context = worker_context(database)
    context.proof = program("unproven", "breaks", LOST)
    assert execute_next(context)
    assert execute_next(context)
    assert context.lost is None


@pytest.mark.slow
def test_a_worker_that_is_to_stop_while_it_proves_its_device_has_lost_nothing(database: Database) -> None:
    context = worker_context(database)
    context.in_doubt, context.proof = True, program("unproven", "hangs")
    before = children()
    with working(context):
        assert eventually(lambda: children() - before)
    assert (context.lost, context.in_doubt) == (None, True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["embedded", "service"])
def test_a_worker_whose_device_is_gone_ends_with_a_sentence(
    database: Database, tmp_path: Path, redis_url: str, mode: str
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
        assert eventually(lambda: registered(database))
        (later / "torch.py").write_text(BROKEN_TORCH)
        first, second = submit(database, matmul()), submit(database, matmul())
        assert worker.wait(90) == 1
        said = [line for line in processes.printed().splitlines() if line.startswith("python -m worker: ")]
    assert [line.partition(", although")[0] for line in said] == ["python -m worker: torch finds no GPU"]
    assert [look(database, job_id).state for job_id in (first, second)] == [JobState.QUEUED] * 2
    assert look(database, first).failure is FailureKind.DEVICE_LOST
    assert not registered(database)


def registered(database: Database) -> list[WorkerView]:
    with database.read() as session:
        return workers.list_(session)


@pytest.mark.parametrize("device", [DeviceKind.ROCM, DeviceKind.XPU, DeviceKind.MPS])
def test_a_worker_for_a_gpu_that_is_not_there_says_which(device: DeviceKind, tmp_path: Path) -> None:
    if probe().has(device):
        pytest.skip("This machine has one.")
    title = KINDS[device].title
    with (
        pytest.raises(
            UnsupportedError, match=f"no {title} that works .*; start the worker with --device cpu"
        ),
        serving(device, tmp_path),
    ):
        pass
