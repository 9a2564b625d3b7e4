"""`python -m worker` itself: how it starts, why it refuses to, which GPU it takes, the file that says it lives."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optigpu.documents.result import Accelerator
from optigpu.hardware.gpu import Gpus, visible
from optigpu.hardware.probe import probed
from optigpu.store import workers
from optigpu.store.database import Database, default_url
from optigpu.vocabulary import DeviceKind, OptiGPUError, UnsupportedError
from tests.breadth import cases
from tests.deploy.compose import read_compose
from tests.drivers.nvml import ROOT, build
from tests.service.processes import Processes, eventually, stop, watched_processes
from tests.service.serving import migrated
from worker import heartbeat
from worker.capabilities import serving

SHOW = """
import os, sys
from worker.__main__ import show_only
show_only(sys.argv[1])
print(os.environ["CUDA_VISIBLE_DEVICES"])
"""
IN_THE_CONTAINER = "/tmp/optigpu-heartbeat"


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


@pytest.mark.long
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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


def asked(uuid: str, library: Path, mode: str = "") -> tuple[str, str]:
    """What CUDA may see afterwards, and the last line of an error."""
    environment = os.environ | {"FAKE_NVML": mode, "LD_LIBRARY_PATH": str(library)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", SHOW, uuid], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "mode", "shown"),
    cases([("GPU-m", "", "GPU-made-up"), ("MIG-made-up-2", "mig", "MIG-made-up-2")], 1),
)
def test_every_other_gpu_is_hidden(library: Path, named: str, mode: str, shown: str) -> None:
    assert asked(named, library, mode) == (shown, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "mode", "sentence"),
    cases(
        [
            ("GPU-other", "", "This machine has no GPU GPU-other; it has: GPU-made-up (NVIDIA Made-up)."),
            ("MIG-made-up", "mig", "Several GPUs begin with MIG-made-up: MIG-made-up-0 "),
            ("GPU-made-up", "not_loaded", "The NVIDIA driver is not loaded; load it and run again."),
        ],
        1,
    ),
)
def test_a_gpu_that_is_not_there_is_a_sentence(library: Path, named: str, mode: str, sentence: str) -> None:
    shown, error = asked(named, library, mode)
    assert shown == ""
    assert sentence in error


@pytest.mark.slow
def test_a_container_without_nvml_is_said_by_the_worker(tmp_path: Path) -> None:
    """In the image's terms: the library of the driver is not there, since nobody reserved a GPU for the container."""
    hidden = {
        "OPTIGPU_DATA_DIR": str(tmp_path),
        "LD_LIBRARY_PATH": str(build(tmp_path)),
        "FAKE_NVML": "absent",
    }
    with migrated(default_url(tmp_path)), watched_processes(tmp_path, hidden) as processes:
        said = refusal(processes, "--device", "cuda", "--gpu", "GPU-5f1c")
    assert said == (
        "python -m worker: This machine has no NVIDIA driver library (libnvidia-ml.so.1); install the driver, or "
        "make it available in the container.\n"
    )


@pytest.mark.slow
def test_a_gpu_for_a_worker_on_the_cpu_is_refused(tmp_path: Path) -> None:
    with watched_processes(tmp_path, {"OPTIGPU_DATA_DIR": str(tmp_path)}) as processes:
        assert "leave one of them out" in refusal(processes, "--device", "cpu", "--gpu", "GPU-5f1c")


@pytest.fixture
def is_healthy(tmp_path: Path) -> Callable[[], bool]:
    """Runs the command of docker-compose.yml, with the test's file in place of the container's."""
    services = read_compose({"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"})["services"]
    shell, command = services["worker-cpu"]["healthcheck"]["test"]
    assert shell == "CMD-SHELL"
    assert IN_THE_CONTAINER in command

    def ask() -> bool:
        asked = command.replace(IN_THE_CONTAINER, str(tmp_path / "heartbeat"))
        return subprocess.run(["/bin/sh", "-c", asked], capture_output=True).returncode == 0

    return ask


def test_a_file_is_fresh_until_the_lease_ends(tmp_path: Path, is_healthy: Callable[[], bool]) -> None:
    assert not is_healthy(), "there is no file yet"
    heartbeat.renew(tmp_path / "heartbeat", 3600)
    assert is_healthy()
    heartbeat.renew(tmp_path / "heartbeat", -1)
    assert not is_healthy()
    assert (tmp_path / "heartbeat").stat().st_mtime < time.time()


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OptiGPUError, match="OPTIGPU_HEARTBEAT_FILE"):
        heartbeat.renew(tmp_path / "no" / "such" / "folder", 1)


@pytest.mark.slow
def test_a_worker_is_healthy_while_it_gives_signs_of_life(
    processes: Processes, database: Database, tmp_path: Path, is_healthy: Callable[[], bool]
) -> None:
    file = {
        "OPTIGPU_HEARTBEAT_FILE": str(tmp_path / "heartbeat"),
        "OPTIGPU_LEASE_S": "2",
        "OPTIGPU_SWEEPS": "1",
    }
    worker = processes.start("worker", "--device", "cpu", **file)
    assert eventually(is_healthy), processes.printed()
    assert "did you mean OPTIGPU_SWEEP_S?" in processes.printed()
    worker.send_signal(signal.SIGSTOP)
    assert eventually(lambda: not is_healthy()), "a worker that hangs"
    worker.send_signal(signal.SIGCONT)
    assert eventually(is_healthy), "it goes on"
    stop(worker)
    assert not is_healthy()
    assert not (tmp_path / "heartbeat").exists()


@pytest.mark.long
@pytest.mark.slow
def test_a_misspelled_setting_is_in_the_log_of_the_service(processes: Processes) -> None:
    more = {"OPTIGPU_EMBEDDED_WORKER": "false", "OPTIGPU_RATELIMIT": "1/second"}
    service = processes.start("api", "--port", "0", **more)
    assert eventually(lambda: "did you mean OPTIGPU_RATE_LIMIT?" in processes.printed()), processes.printed()
    assert eventually(lambda: "OptiGPU listens on" in processes.printed())
    stop(service)
