"""Whether a worker is alive, as the health check of docker-compose.yml asks it; and what it says of its settings."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optigpu.store.database import Database, default_url
from optigpu.vocabulary import OptiGPUError
from tests.deploy.compose import read_compose
from tests.service.processes import Processes, eventually, stop, watched_processes
from tests.service.workers import migrated
from worker import heartbeat_file

IN_THE_CONTAINER = "/tmp/optigpu-heartbeat"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with watched_processes(tmp_path, {"OPTIGPU_DATA_DIR": str(tmp_path)}) as processes:
        yield processes


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with migrated(default_url(tmp_path)) as database:
        yield database


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
    heartbeat_file.renew(tmp_path / "heartbeat", 3600)
    assert is_healthy()
    heartbeat_file.renew(tmp_path / "heartbeat", -1)
    assert not is_healthy()
    assert (tmp_path / "heartbeat").stat().st_mtime < time.time()


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OptiGPUError, match="OPTIGPU_HEARTBEAT_FILE"):
        heartbeat_file.renew(tmp_path / "no" / "such" / "folder", 1)


@pytest.mark.slow
def test_a_worker_is_healthy_while_it_gives_signs_of_life(
    processes: Processes, database: Database, tmp_path: Path, is_healthy: Callable[[], bool]
) -> None:
    file = {"OPTIGPU_HEARTBEAT_FILE": str(tmp_path / "heartbeat"), "OPTIGPU_LEASE_S": "2"}
    worker = processes.start("worker", "--device", "cpu", **file)
    assert eventually(is_healthy), processes.printed()
    worker.send_signal(signal.SIGSTOP)
    assert eventually(lambda: not is_healthy()), "a worker that hangs"
    worker.send_signal(signal.SIGCONT)
    assert eventually(is_healthy), "it goes on"
    stop(worker)
    assert not is_healthy()
    assert not (tmp_path / "heartbeat").exists()


@pytest.mark.slow
def test_a_misspelled_setting_is_in_the_log(processes: Processes, database: Database) -> None:
    worker = processes.start("worker", "--device", "cpu", OPTIGPU_SWEEPS="1")
    assert eventually(lambda: "did you mean OPTIGPU_SWEEP_S?" in processes.printed()), processes.printed()
    assert eventually(lambda: "worker.started" in processes.printed())
    stop(worker)


@pytest.mark.slow
def test_a_misspelled_setting_is_in_the_log_of_the_service(processes: Processes) -> None:
    more = {"OPTIGPU_EMBEDDED_WORKER": "false", "OPTIGPU_RATELIMIT": "1/second"}
    service = processes.start("api", "--port", "0", **more)
    assert eventually(lambda: "did you mean OPTIGPU_RATE_LIMIT?" in processes.printed()), processes.printed()
    assert eventually(lambda: "OptiGPU listens on" in processes.printed())
    stop(service)
