"""Every reason of a verdict, provoked from outside around real rounds of a real measuring process.

The machine that runs these tests may itself be busy, so that they say what must be found, and never that nothing else
was: that is said on made-up host_samples in tests/unit/test_verdict.py, and measured in docs/results/quiet_runs.json.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from optigpu.child.messages import Audited, RunAudit
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.locks import hold, others_measure
from optigpu.conductor.verdicts.detectors import STOPPED_RATIO, STOPPED_S
from optigpu.conductor.verdicts.host_monitor import HostMonitor
from optigpu.documents.result import Accelerator, VerdictReason, VerdictWarning
from optigpu.hardware.probe import probe
from optigpu.vocabulary import DeviceKind
from tests.engine.measuring import (
    ROUNDS,
    Standing,
    measured,
    standing_ready,
    verdict,
    verdict_as_if_alone,
    verdict_as_if_beside,
)
from tests.engine.processes import wait_until

pytestmark = pytest.mark.usefixtures("forked_children")

HONEST = (sys.executable, "-P", "-m", "optigpu.child.replicate")
STOOD_STILL = re.compile(r"A request stood still for ([0-9.]+) s")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """A measuring process that tampers with nothing. What a test does to it is over at the test's end."""
    with standing_ready(tmp_path_factory.mktemp("honest"), HONEST) as standing:
        yield standing


@contextmanager
def busy_loop(folder: Path, niceness: int) -> Iterator[str]:
    """A process with a unique name that never rests."""
    script = folder / f"hog{os.getpid()}"
    script.write_text("#!/bin/sh\nwhile :; do :; done\n")
    script.chmod(0o755)
    with subprocess.Popen(["nice", "-n", str(niceness), str(script)]) as process:
        try:
            wait_until(lambda: psutil.Process(process.pid).name() == script.name)
            yield script.name
        finally:
            process.kill()


@pytest.mark.long
def test_a_busy_loop_beside_the_run_is_a_foreign_process(honest: Standing, tmp_path: Path) -> None:
    with busy_loop(tmp_path, niceness=0) as name:
        replicate = measured(honest)
    used_s = sum(sample.named.get(name, 0.0) for sample in replicate.host_samples)
    foreign_s = sum(sample.foreign_s or 0.0 for sample in replicate.host_samples)
    assert used_s > 0.15 * sum(sample.wall_s for sample in replicate.host_samples)
    assert foreign_s > used_s - 0.1, "all of what it used is in the count"
    judged = verdict(replicate)
    assert VerdictReason.FOREIGN_PROCESS in judged.reasons
    assert any("Other processes used" in note for note in judged.notes)


@pytest.mark.long
def test_a_busy_loop_of_the_lowest_priority_is_one_too(honest: Standing, tmp_path: Path) -> None:
    with busy_loop(tmp_path, niceness=19) as name:
        replicate = measured(honest)
    crowding = frozenset.intersection(*(sample.crowding for sample in replicate.host_samples))
    assert name in {name for _, _, name in crowding}
    judged, beside = verdict(replicate), verdict_as_if_beside(replicate, name)
    is_found = {VerdictReason.FOREIGN_PROCESS, VerdictWarning.DISTURBED} & {*judged.reasons, *judged.warnings}
    # A busy machine's note names those that used more.
    is_named = any(name in note for note in beside.notes)
    # Where others keep every core busy, the kernel gives it a hundredth of one: then it disturbs nothing.
    used_s = sum(sample.named.get(name, 0.0) for sample in replicate.host_samples)
    assert (is_found and is_named) or used_s < 0.05 * sum(each.wall_s for each in replicate.host_samples)


@pytest.mark.slow
def test_what_the_measuring_process_uses_is_not_foreign(honest: Standing) -> None:
    own = {honest.child.pid}
    monitor = HostMonitor(DeviceKind.CPU, probe(), lambda: own)
    timed, process = honest.timed_rounds(monitor), psutil.Process(honest.child.pid)
    times, before = process.cpu_times(), monitor.read()
    for _ in range(ROUNDS):
        timed.measure_one(honest.progress)
    after, later = monitor.read(), process.cpu_times()
    name = process.name()
    sample = monitor.between(before, after)
    assert before.cpu is not None
    assert after.cpu is not None
    assert sample.foreign_s is not None
    used_s = later.user + later.system - times.user - times.system
    assert used_s > 0.1
    assert sample.foreign_s <= after.cpu.work_s - before.cpu.work_s - used_s + 0.1
    own.clear()
    stranger = HostMonitor(DeviceKind.CPU, probe(), lambda: own)
    seen = stranger.between(replace(before, own=frozenset()), replace(after, own=frozenset()))
    assert seen.foreign_s == pytest.approx(sample.foreign_s + used_s, abs=0.1), (
        "it was ours because we said so"
    )
    assert seen.named[name] - sample.named.get(name, 0.0) == pytest.approx(used_s, abs=0.1)


@pytest.mark.slow
def test_a_process_that_is_stopped_in_a_round_stood_still(honest: Standing) -> None:
    """It is stopped up to three times, since the first one may hit what precedes the requests of a round. None of the
    figures comes from these requests."""
    over = threading.Event()
    threads: list[threading.Thread] = []
    still_s = STOPPED_S + 3 * STOPPED_RATIO * honest.ready.request_s

    def disturb(number: int, child: Child) -> None:
        if number == ROUNDS:
            threads.append(threading.Thread(target=interrupt, args=(child.pid, still_s, over)))
            threads[0].start()

    try:
        judged = verdict_as_if_alone(measured(honest, disturb, rounds=ROUNDS + 1))
    finally:
        over.set()
        threads[0].join()
    assert VerdictWarning.DISTURBED in judged.warnings
    (said_s,) = (float(said[1]) for note in judged.notes if (said := STOOD_STILL.search(note)))
    assert said_s > still_s - honest.ready.request_s - 0.1


def interrupt(pid: int, still_s: float, over: threading.Event) -> None:
    with suppress(ProcessLookupError):
        for _ in range(3):
            if over.wait(0.3):
                return
            os.kill(pid, signal.SIGSTOP)
            time.sleep(still_s)
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_an_honest_process_answers_fresh_inputs_as_fast(honest: Standing) -> None:
    timed = honest.timed_rounds(HostMonitor(DeviceKind.CPU, probe(), set))
    for _ in range(ROUNDS):
        timed.measure_one(honest.progress)
    fresh = ask(honest.child, RunAudit(requests=20, seed=7), Audited, honest.progress)
    assert VerdictReason.CACHED_RESULT not in verdict(replace(timed.replicate(), audit=fresh)).reasons


def group_folder() -> Path:
    """Where a control group with a quota of CPU time would be made."""
    mount = Path("/sys/fs/cgroup")
    return mount if (mount / "cgroup.controllers").is_file() else mount / "cpu"


def make_group(name: str) -> Path | None:
    """A group that may use a fifth of one CPU; None where this machine lets us make none."""
    folder = group_folder() / f"optigpu-{name}-{os.getpid()}"
    try:
        folder.mkdir()
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text("20000 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text("20000")
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return None
    return folder


def can_make_groups() -> bool:
    """As root, outside most containers."""
    folder = make_group("probe")
    if folder:
        folder.rmdir()
    return folder is not None


@pytest.fixture
def inside_a_quota(honest: Standing) -> Iterator[None]:
    """This process and the one that measures, in a group with a quota; to start in there would take long."""
    before = group_folder() / _own_group().lstrip("/") / "cgroup.procs"
    folder = make_group("quota")
    assert folder is not None
    for pid in (honest.child.pid, os.getpid()):
        (folder / "cgroup.procs").write_text(str(pid))
    yield
    for pid in (honest.child.pid, os.getpid()):
        before.write_text(str(pid))
    wait_until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def _own_group() -> str:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return next(
        path for number, names, path in lines if "cpu" in names.split(",") or (number, names) == ("0", "")
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_make_groups(), reason="no control group can be made here: it takes root")
def test_a_quota_of_cpu_time_throttles(honest: Standing, inside_a_quota: None) -> None:
    judged = verdict(measured(honest))
    assert VerdictReason.THROTTLED in judged.reasons
    assert any("CPU quota made threads wait" in note for note in judged.notes)


def machine(gpu: str) -> Accelerator:
    return Accelerator(name="g", memory_bytes=1, uuid=gpu)


def test_a_job_on_another_gpu_shares_the_host_and_is_not_disturbed_by_the_question(tmp_path: Path) -> None:
    here = probe().model_copy(update={"accelerators": (machine("a"),)})
    there = probe().model_copy(update={"accelerators": (machine("b"),)})

    def never() -> None:
        pytest.fail("it had to wait")

    with hold(tmp_path, DeviceKind.CUDA, here, never):
        assert not others_measure(tmp_path, DeviceKind.CUDA, here)
        with hold(tmp_path, DeviceKind.CUDA, there, never):
            assert others_measure(tmp_path, DeviceKind.CUDA, here)
            assert others_measure(tmp_path, DeviceKind.CUDA, there)
        assert not others_measure(tmp_path, DeviceKind.CUDA, here)
        with hold(tmp_path, DeviceKind.CUDA, there, never):
            pass
    assert not others_measure(tmp_path / "nothing", DeviceKind.CUDA, here)
