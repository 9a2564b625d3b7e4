"""What a measuring process is denied, seen from inside of real processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.child.confined import MOST_OPEN_FILES, reach
from optigpu.child.messages import Progress, RunRound
from optigpu.conductor.processes import confinement
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.confinement import confined_program, largest_file, needs_network
from optigpu.conductor.processes.variables import child_variables
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.paths import data_dir
from optigpu.vocabulary import UnsupportedError
from tests.engine.processes import program
from tests.engine.sessions import session_with

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
        while (answer := child.listen()) is None:
            pass
    assert isinstance(answer, Progress)
    found: dict[str, Any] = json.loads(answer.doing)
    return found


def test_a_process_without_network_has_nothing_but_itself(listening: int, may_leave: bool) -> None:
    """Where the kernel does not allow it, the process says that it could reach the host's network."""
    found = facts(listening, network=False)
    assert found["reach"] == ("loopback" if may_leave else reach())
    assert found["reaches_the_host"] is not may_leave
    assert found["reaches_itself"]
    assert found["user"] == [os.getuid(), os.getgid()]


def test_a_process_that_needs_the_network_has_it(listening: int) -> None:
    found = facts(listening, network=True)
    assert found["reaches_the_host"]
    assert found["name"] == "__main__"


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


def test_a_program_that_cannot_be_started_leaves_no_folder() -> None:
    scratch = data_dir() / "scratch"
    before = sorted(scratch.glob("tmp-*"))
    with pytest.raises(Exception, match="cannot be started"):
        Child(("/nowhere/at/all",), {})
    assert sorted(scratch.glob("tmp-*")) == before


def test_no_file_may_take_the_last_of_the_disk(tmp_path: Path) -> None:
    statistics = os.statvfs(tmp_path)
    free = statistics.f_bavail * statistics.f_frsize
    assert largest_file(tmp_path) <= max(free, confinement.LEAST_LARGEST_BYTES)


def test_a_program_is_confined_within_its_own_process(tmp_path: Path) -> None:
    command = confined_program(("python", "-P", "-m", "some.module", "--x"), network=False, folder=tmp_path)
    assert command[:4] == ("python", "-P", "-m", "optigpu.child.confined")
    assert command[5:] == ("loopback", "some.module", "--x")


def a_job(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "bundled:tiny"} | changes)


ENDPOINT = {"backend": "endpoint", "endpoint": "http://127.0.0.1:8000#tiny"}


@pytest.mark.parametrize(
    ("changes", "variables", "needs"),
    [
        ({}, {}, False),
        ({"model": "preset:gpt2"}, {}, False),
        ({"model": "path:mine"}, {}, False),
        ({"model": "hub:some/model"}, {}, True),
        ({"model": "hub:some/model"}, {"HF_HUB_OFFLINE": "1"}, False),
        ({"stack": [{"name": "speculative_decoding", "draft": "some/draft"}]}, {}, True),
        ({"measure": {"quality": {"text": "wikitext-2"}}}, {}, True),
        ({"measure": {"quality": {"text": "wikitext-2"}}}, {"OPTIGPU_DATASETS_DIR": "/data"}, False),
        ({"measure": {"quality": {"text": "wikitext-2"}, "meters": ["latency"]}}, {}, False),
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
