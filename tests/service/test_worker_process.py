"""`python -m worker` itself: how it starts, why it refuses to, and what it does not load."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from optigpu.documents.result import Accelerator
from optigpu.hardware.gpu import Gpus, visible
from optigpu.hardware.probe import probed
from optigpu.store import workers
from optigpu.store.database import Database, default_url
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.drivers.nvml import build
from tests.service.processes import Processes, eventually, stop, watched_processes
from tests.service.workers import ENDLESS, matmul, measuring_processes, migrated, submit
from worker.capabilities import serving


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with watched_processes(tmp_path, {"OPTIGPU_DATA_DIR": str(tmp_path)}) as processes:
        yield processes


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with migrated(default_url(tmp_path)) as database:
        yield database


def refusal(processes: Processes, *arguments: str, **variables: str) -> str:
    """What a worker that does not start prints."""
    assert processes.start("worker", *arguments, **variables).wait(60) == 2
    return processes.printed()


@pytest.mark.slow
def test_without_a_gpu_a_worker_for_one_says_so_in_a_sentence(
    processes: Processes, database: Database
) -> None:
    said = refusal(processes, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert said.startswith("python -m worker: This machine has no NVIDIA GPU that works (")
    assert said.endswith("; start the worker with --device cpu.\n")


@pytest.mark.slow
def test_a_database_without_tables_is_said_in_a_sentence(processes: Processes) -> None:
    assert refusal(processes).splitlines() == [
        "python -m worker: The database has no tables yet; run `alembic upgrade head` on it."
    ]


@pytest.mark.slow
def test_a_data_folder_that_cannot_be_made_is_said_in_a_sentence(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    said = refusal(processes, OPTIGPU_DATABASE_URL=f"sqlite:///{tmp_path / 'file' / 'optigpu.db'}")
    assert said.startswith(
        f"python -m worker: The folder of the database, {tmp_path / 'file'}, cannot be made"
    )


@pytest.mark.slow
def test_a_wrong_setting_is_named(processes: Processes) -> None:
    assert refusal(processes, OPTIGPU_LEASE_S="soon", OPTIGPU_POLL_S="0") == (
        "python -m worker: OPTIGPU_LEASE_S: The value is not a number. OPTIGPU_POLL_S: The value is too small; it must "
        "be more than 0.\n"
    )


@pytest.mark.slow
def test_neither_mode_loads_torch() -> None:
    code = "import sys, worker.__main__, worker.app; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_a_worker_that_measures_has_no_torch_in_its_memory(processes: Processes, database: Database) -> None:
    submit(database, matmul(measure=ENDLESS))
    worker = processes.start("worker", "--device", "cpu")
    (child,) = eventually(lambda: measuring_processes(psutil.Process(worker.pid)))
    assert eventually(lambda: "libtorch" in maps(child.pid))
    assert "libtorch" not in maps(worker.pid)
    stop(worker)


@pytest.mark.slow
def test_a_torch_without_cuda_beside_a_gpu_keeps_the_worker_from_starting(
    processes: Processes, database: Database, tmp_path: Path
) -> None:
    """The GPU is made up; a torch that was built for CUDA does not find it either."""
    said = refusal(processes, LD_LIBRARY_PATH=str(build(tmp_path)))
    assert said.startswith("python -m worker: torch ")
    assert re.search("was built without CUDA and cannot use NVIDIA Made-up|finds no GPU, although", said)
    assert said.count("\n") == 1, "one sentence and nothing else"
    with database.read() as session:
        assert workers.list_(session) == []


def test_workers_of_a_host_with_several_gpus_take_one_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The GPUs are made up: what is tested is who takes which, and what its measuring processes will see."""
    monkeypatch.setattr(sys.modules[probed.__module__], "gpus", lambda: Gpus(shown(), driver="570.00"))
    with serving(None, tmp_path) as first:
        assert (first.device, first.gpus, first.vram_bytes) == (DeviceKind.CUDA, ("Model 0",), 10)
        assert (first.gpu_uuid, first.measures_on) == ("GPU-0", "GPU-0")
        assert os.environ.pop("CUDA_VISIBLE_DEVICES") == "GPU-0"
        with serving(DeviceKind.CUDA, tmp_path) as second:
            assert (second.gpus, second.vram_bytes, second.measures_on) == (("Model 1",), 11, "GPU-1")
            with (
                pytest.raises(UnsupportedError, match="Other workers serve"),
                serving(DeviceKind.CUDA, tmp_path),
            ):
                pass
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    with serving(None, tmp_path) as third:
        assert third.gpus == ("Model 0",)


@pytest.fixture(autouse=True)
def every_gpu_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again after the test, whatever a worker has hidden."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def shown() -> tuple[Accelerator, ...]:
    every = [Accelerator(name=f"Model {n}", memory_bytes=10 + n, uuid=f"GPU-{n}") for n in range(2)]
    return visible(every, os.environ.get("CUDA_VISIBLE_DEVICES"))


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()
