"""Programs of ours as plain processes: started, stopped, and nothing of them left behind."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

MARKER = "LC_OPTIGPU_TEST_MARKER"  # measuring processes get only what is listed, and LC_* is
LISTENS = "OptiGPU listens on "
STOP_WITHIN_S = 15.0

T = TypeVar("T")


class Processes:
    """Starts `python -m ...`; every process that descends from one carries a marker in its environment."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self._folder = folder
        self._marker = uuid.uuid4().hex
        self._variables = variables
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        """Starts `python -m arguments`; `variables` are added to its environment, its output goes to a file."""
        environment = dict(os.environ) | self._variables | variables | {MARKER: self._marker}
        with self.output(len(self._started)).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def output(self, number: int) -> Path:
        """The file with what the process that was started as that number has printed."""
        return self._folder / f"process-{number}.log"

    def alive(self) -> list[psutil.Process]:
        """Every process with our marker."""
        return processes_with(MARKER, self._marker)

    def printed(self) -> str:
        """What all of them have printed."""
        texts = (self.output(number).read_text(errors="replace") for number in range(len(self._started)))
        return "\n".join(texts)

    def kill_all(self) -> None:
        """Kills what is left and reaps what was started."""
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for started in self._started:
            started.wait()


@contextmanager
def watched_processes(folder: Path, variables: dict[str, str]) -> Iterator[Processes]:
    """Processes of which none may be left at the end; those of a test that fails are killed, their output shown."""
    processes = Processes(folder, variables)
    try:
        yield processes
        left = eventually(lambda: not processes.alive(), STOP_WITHIN_S)
        assert left, f"left behind: {[process.cmdline() for process in processes.alive()]}"
    except BaseException:
        print(processes.printed())
        raise
    finally:
        processes.kill_all()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process by SIGTERM; it must go in time, and say that all went well."""
    process.terminate()
    assert process.wait(STOP_WITHIN_S) == 0


def address(processes: Processes) -> str:
    """Where the service listens, read from what it printed."""

    def printed() -> str:
        lines = processes.printed().splitlines()
        return next((line.removeprefix(LISTENS) for line in lines if line.startswith(LISTENS)), "")

    found = eventually(printed)
    assert found, processes.printed()
    return found


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables for a service of its own, without a worker."""
    return {
        "OPTIGPU_DATABASE_URL": f"sqlite:///{folder / 'optigpu.db'}",
        "OPTIGPU_DATA_DIR": str(folder),
        "OPTIGPU_EMBEDDED_WORKER": "false",
        **more,
    }


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """The processes whose environment has `name=value`, however deep they were started and in whatever group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def processes_left(name: str, value: str, *, within_s: float = 30.0) -> list[psutil.Process]:
    """What is still there when the time is over; empty as soon as nothing is."""
    eventually(lambda: not processes_with(name, value), within_s)
    return processes_with(name, value)


def eventually(condition: Callable[[], T], within_s: float = 60.0) -> T:
    """Asks until the answer is true or the time is over; returns the last answer."""
    deadline = time.monotonic() + within_s
    while not (answer := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer
