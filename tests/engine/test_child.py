"""A measuring process seen from the conductor, and what it is denied, seen from inside of real processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optigpu.child.confined import MOST_OPEN_FILES, reach
from optigpu.child.messages import Progress, Ready, Round, RunRound
from optigpu.conductor.processes import child as child_module
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.confinement import child_variables, needs_network
from optigpu.hardware.cgroup import oom_kills
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.paths import data_dir
from optigpu.vocabulary import OutOfMemoryError, ReplicateError, UnsupportedError
from tests.engine.processes import is_alive, program, wait_until
from tests.engine.sessions import session_with
from tests.engine.test_replicate import answer, ask, assignment

ASSIGNMENT = assignment({"kind": "generate"}, "preset:tiny-llama-test")


def start(name: str, *arguments: object, keep: tuple[int, ...] = ()) -> Child:
    child = Child(program(name, *arguments), child_variables(1), keep)
    child.tell(ASSIGNMENT)
    return child


def test_full_pipes_on_all_sides_do_not_lock_up() -> None:
    with start("chatty") as child:
        for _ in range(200):
            child.tell(RunRound(seconds=0.001))  # more than a pipe holds, before the first is read
        assert isinstance(answer(child), Ready)
        assert all(isinstance(answer(child), Round) for _ in range(200))


@pytest.mark.parametrize("kind", ["text", "binary", "unknown", "nan"])
def test_garbage_is_refused_with_what_was_printed(kind: str) -> None:
    with (
        start("garbage", kind) as child,
        pytest.raises(ReplicateError, match="sent an invalid message") as raised,
    ):
        answer(child)
    assert "help" in str(raised.value)
    assert not {"\x00", "\x1b"} & set(str(raised.value)), "no database and no terminal wants these"


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "LONGEST_LINE", 1024)
    with start("garbage", "endless") as child, pytest.raises(ReplicateError, match="message of more than"):
        answer(child)


@pytest.mark.parametrize(
    ("how", "words"),
    [("3", "ended with status 3"), ("0", "ended with status 0"), ("SIGSEGV", "killed by signal 11")],
)
def test_a_death_is_reported_with_its_cause_and_the_last_words(how: str, words: str) -> None:
    with start("dying", how, 0) as child:
        answer(child)
        with pytest.raises(ReplicateError, match=f"{words}.*last words") as raised:
            ask(child, RunRound(seconds=1))
    assert not isinstance(raised.value, OutOfMemoryError)


def test_sigkill_is_memory_only_when_the_kernel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "proc" / "vmstat"
    counter.parent.mkdir()
    counter.write_text("oom_kill 7\n")
    monkeypatch.setattr(child_module, "oom_kills", partial(oom_kills, tmp_path))
    with start("dying", "SIGKILL", 0) as child:
        answer(child)
        with pytest.raises(ReplicateError, match="killed by signal 9"):
            ask(child, RunRound(seconds=1))
    with start("dying", "SIGKILL", 0, counter) as child:
        answer(child)
        with pytest.raises(OutOfMemoryError, match="out of memory: the kernel"):
            ask(child, RunRound(seconds=1))


@pytest.mark.slow
def test_the_kernel_kills_for_memory(small_group: Path) -> None:
    with (
        start("hungry", small_group) as child,
        pytest.raises(OutOfMemoryError, match="out of memory: the kernel"),
    ):
        answer(child)


@pytest.mark.slow
def test_what_ignores_its_stdin_and_sigterm_is_killed(tmp_path: Path) -> None:
    with start("deaf", tmp_path / "pid") as child:
        wait_until(lambda: child.listen() is not None)
        assert child.end(0.1) == -9
    assert not is_alive(child.pid)


@pytest.mark.parametrize("how", ["die", "obey"])
def test_nothing_that_it_started_is_left(tmp_path: Path, how: str) -> None:
    with start("parent", tmp_path / "pids", how) as child:
        if how == "obey":
            assert isinstance(answer(child), Ready)
        else:  # one of its processes holds the answers' pipe open: its death is found out all the same
            with pytest.raises(ReplicateError, match="killed by signal 9"):
                answer(child)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert not any(is_alive(pid) for pid in (child.pid, *pids))


def test_no_descriptor_is_left() -> None:
    before = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
    with start("well_behaved") as child:
        answer(child)
    with pytest.raises(ReplicateError, match="cannot be started"):
        Child(("/nowhere/at/all",), {})
    assert before == (sorted(os.listdir("/proc/self/fd")) if before else [])


def test_the_environment_is_clean_and_explicit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPTIGPU_DATABASE_URL", "OPTIGPU_API_KEY", "LD_PRELOAD", "MKL_NUM_THREADS", "TORCH_LOGS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    with Child(program("well_behaved"), child_variables(3)) as child:
        child.tell(ASSIGNMENT)
        ready = answer(child)
    assert isinstance(ready, Ready)
    variables = ready.facts.model_dump()["recorded"]["variables"]
    assert not {
        "OPTIGPU_DATABASE_URL",
        "OPTIGPU_API_KEY",
        "LD_PRELOAD",
        "MKL_NUM_THREADS",
        "TORCH_LOGS",
    } & set(variables)
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert variables["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    assert (
        Path(variables["PYTHONPATH"].split(os.pathsep)[0]) / "optigpu" / "child" / "replicate.py"
    ).is_file()


MAY_LEAVE = "import sys; from optigpu.child.confined import leave_network; sys.exit(not leave_network())"


@pytest.fixture
def listening() -> Iterator[int]:
    """The port of something on this host's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def may_leave() -> bool:
    """Whether the kernel lets a process of ours have a network of its own."""
    return subprocess.run([sys.executable, "-c", MAY_LEAVE], check=False).returncode == 0


def facts(port: int, *, network: bool) -> dict[str, Any]:
    """What a process says of itself."""
    with Child(program("confined_facts", port), child_variables(1), network=network) as child:
        child.tell(RunRound(seconds=1))
        while (heard := child.listen()) is None:
            pass
    assert isinstance(heard, Progress)
    found: dict[str, Any] = json.loads(heard.doing)
    return found


def test_a_process_without_network_has_nothing_but_itself(listening: int, may_leave: bool) -> None:
    """Where the kernel does not allow it, the process says that it could reach the host's network."""
    found = facts(listening, network=False)
    assert found["reach"] == ("loopback" if may_leave else reach())
    assert found["reaches_the_host"] is not may_leave
    assert found["reaches_itself"]
    assert found["user"] == [os.getuid(), os.getgid()]


def test_files_are_bounded_and_no_core_is_left(listening: int) -> None:
    found = facts(listening, network=True)
    assert found["core"] == [0, 0]
    assert 0 < found["files"] <= MOST_OPEN_FILES
    assert found["largest_file"] > 0
    assert not found["can_write_more"]


def test_its_temporary_directory_is_its_own_and_goes_with_it(listening: int) -> None:
    first, second = (facts(listening, network=True)["temporary"] for _ in range(2))
    assert first != second
    for folder in (first, second):
        assert Path(folder).parent == data_dir() / "scratch"
        assert not Path(folder).exists()


def a_job(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "bundled:tiny"} | changes)


ENDPOINT = {"backend": "endpoint", "endpoint": "http://127.0.0.1:8000#tiny"}


@pytest.mark.parametrize(
    ("changes", "variables", "needs"),
    [
        ({}, {}, False),
        ({"model": "preset:gpt2"}, {}, False),
        ({"model": "hub:some/model"}, {}, True),
        ({"model": "hub:some/model"}, {"HF_HUB_OFFLINE": "1"}, False),
        ({"stack": [{"name": "speculative_decoding", "draft": "some/draft"}]}, {}, True),
        ({"measure": {"quality": {"text": "wikitext-2"}}}, {}, True),
        ({"measure": {"quality": {"text": "wikitext-2"}}}, {"OPTIGPU_DATASETS_DIR": "/data"}, False),
        (ENDPOINT, {}, True),
        ({}, {"OPTIGPU_WALL_METER": "http://meter.local/power"}, True),
        ({}, {"OPTIGPU_WALL_METER": "/run/meter"}, False),
    ],
    ids=str,
)
def test_a_job_needs_the_network_or_does_not(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], variables: dict[str, str], needs: bool
) -> None:
    for name in ("HF_HUB_OFFLINE", "OPTIGPU_DATASETS_DIR", "OPTIGPU_WALL_METER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spec = a_job(**changes)
    quality = spec.measure.quality if "quality" in spec.measure.meters else None
    assert needs_network(variants_of(spec)[-1], quality) is needs


def test_a_worker_starts_no_process_for_an_organisation_that_is_not_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPTIGPU_HUB_ORGANISATIONS", "trusted")
    spec = a_job(model="hub:other/model")
    session, _ = session_with(spec, tmp_path, "well_behaved")
    with (
        pytest.raises(UnsupportedError, match="OPTIGPU_HUB_ORGANISATIONS allows trusted alone"),
        session.child(variants_of(spec)[0]),
    ):
        pass


LEAVES = """
import ctypes, os
from optigpu.child.confined import leave_network, reach
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as a process is that was started by this user
before, user = reach(), os.getuid()
print(leave_network(), before, reach(), user == os.getuid())
"""


def test_a_user_without_rights_leaves_the_network_and_stays_who_it_is() -> None:
    """In a user namespace; where the kernel allows none, nothing changes."""
    done = subprocess.run([sys.executable, "-c", LEAVES], check=True, capture_output=True, text=True)
    left, before, after, same_user = done.stdout.split()
    assert after == ("loopback" if left == "True" else before)
    assert same_user == "True"
