"""Storages: what base promises, a power cut (the process is killed), and a medium that is full."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from esp32_agent.port.base import Storage
from esp32_agent.port.host.storage import FileStorage
from esp32_agent.port.micropython.storage import FlashStorage
from tests.edge.tools import micropython

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("on_device.py")
LINE = 7


@pytest.fixture(params=[FileStorage, FlashStorage], ids=["host", "micropython"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Both classes, here under CPython."""
    folder = tmp_path / "deep" / "data"
    made: Storage = request.param(folder if request.param is FileStorage else str(folder))
    return made


@pytest.fixture(params=["cpython", "micropython"])
def command(request: pytest.FixtureRequest) -> list[str]:
    """Runs the script in an interpreter."""
    interpreter = [sys.executable] if request.param == "cpython" else [str(micropython())]
    return [*interpreter, str(SCRIPT)]


def environment() -> dict[str, str]:
    return os.environ | {"MICROPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}


def test_a_file_is_replaced_read_in_part_and_removed(storage: Storage) -> None:
    storage.replace("state", b"old")
    storage.replace("state", b"0123456789")
    assert storage.read("state") == b"0123456789"
    assert storage.read("state", 3, 4) == b"3456"
    assert storage.read("state", 8, 10) == b"89"
    assert storage.read("state", 20, 10) == b""
    storage.remove("state")
    assert storage.read("state") is None


def test_a_log_grows_and_is_cut(storage: Storage) -> None:
    storage.append("log", b"a" * 3000)
    storage.append("log", b"b" * 3000)
    assert storage.size("log") == 6000
    storage.truncate("log", 3001)
    storage.append("log", b"c")
    assert storage.read("log") == b"a" * 3000 + b"bc"


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3, 17, 60, 61])
def test_a_power_cut_leaves_old_or_new_content_and_a_log_without_gaps(
    command: list[str], tmp_path: Path, after: int
) -> None:
    process = subprocess.Popen(
        [*command, "churn", str(tmp_path / "data")], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(after):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = after + len(process.stdout.readlines())
    kept = FileStorage(tmp_path / "data")
    state, log = kept.read("state") or b"", kept.read("log") or b""
    assert len(state) == 400 * LINE
    assert state == state[:LINE] * 400
    assert int(state[:LINE]) in (done, done + 1)
    lines = log.split(b"\n")
    assert [int(line) for line in lines[:-1]] == list(range(1, len(lines)))
    assert len(lines) - 1 in (done - 1, done, done + 1)
    kept.replace("state", b"goes on")
    assert kept.read("state") == b"goes on"


@pytest.mark.slow
def test_a_full_medium_is_said_and_loses_nothing(command: list[str], tmp_path: Path) -> None:
    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    done = subprocess.run(
        [*command, "full", str(tmp_path / "data")],
        env=environment() | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, check=False, preexec_fn=little_room,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines() == [
        "replace True", "old True 0", "append True", "kept True True", "again True 9500",
    ]  # fmt: skip


def test_a_part_that_did_not_fit_is_cut_off_on_a_host(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    storage.append("log", b"whole")
    with contextlib.ExitStack() as stack:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
        with pytest.raises(Exception, match="The storage is full"):
            storage.append("log", b"torn in two")
    assert storage.read("log") == b"whole"
