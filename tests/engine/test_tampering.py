"""Measuring processes that cheat, and machines that disturb them, are found out, also on a machine that is busy."""

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

from optigpu.backends import BACKENDS
from optigpu.child.messages import Audited, RunAudit
from optigpu.conductor.processes.child import Child, ask
from optigpu.conductor.verdicts.contradictions import STOPPED_RATIO, STOPPED_S
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.documents.result import Accelerator, VerdictReason, VerdictWarning
from optigpu.hardware.probe import probe
from optigpu.vocabulary import DeviceKind
from tests.breadth import spread
from tests.engine.children.attacks import put_back
from tests.engine.children.tampered import tamper
from tests.engine.measuring import (
    ROUNDS,
    Standing,
    in_process,
    measured,
    standing,
    standing_ready,
    verdict,
    verdict_as_if_alone,
)
from tests.engine.processes import program, wait_until

pytestmark = pytest.mark.usefixtures("forked_children")


HINDERED_S = 1.0
"""CPU time that a process uses in a pause."""
ATTACKS: dict[str, dict[str, str]] = {
    "NotANumber": {"output_invalid": "NaN or infinite"},
    "LosesOne": {"output_invalid": "instead of (1, 8)"},
    "SpoiledLater": {"output_invalid": "NaN or infinite"},
    "ChangesInputs": {"output_invalid": "changed its own inputs"},
    "ChangesTimedInputs": {"output_invalid": "changed its own inputs"},
    "AnswersFirst": {"output_invalid": "are not what the engine predicts"},
    "ReadsTheReference": {"output_invalid": "are not what the engine predicts"},
    "MakesUpTokens": {"output_invalid": "are not what the engine predicts"},
    "KnowsTheSeed": {"cached_result": "Requests with fresh inputs took at least"},
    "FinishesLater": {"clock_contradicted": "% of the time that a request takes"},
    "TellsHalf": {"clock_contradicted": "% of the time that a request takes"},
    "SlowsTheClock": {
        "clock_contradicted": "neither messages nor other processes explain",
        "harness_replaced": "time.perf_counter, time.perf_counter_ns was replaced",
    },
    "SetsTheTime": {"harness_replaced": "time.time was replaced"},
    "PraisesItself": {"harness_replaced": "optigpu.meters.memory.MemoryMeter.read was replaced"},
    "HalfPrecision": {"undeclared_rounding": "Matrices were multiplied in bfloat16"},
}
"""The reasons that each attack has, with words of their notes."""


@pytest.mark.slow
def test_an_answer_from_memory_is_a_cached_result(tmp_path: Path) -> None:
    with standing_ready(tmp_path, program("tampered", "Remembers")) as process:
        judged = verdict(measured(process))
    assert VerdictReason.CACHED_RESULT in judged.reasons
    assert VerdictReason.OUTPUT_INVALID not in judged.reasons, "what it gives is right"


@pytest.fixture
def undone() -> Iterator[None]:
    """What an attack replaced in this process is put back."""
    yield
    put_back()


@pytest.mark.slow
@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize("tampering", spread(ATTACKS, by_default=5))
def test_an_attack_is_invalid_with_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tampering: str
) -> None:
    """What measures runs in this process: what finds these out is in it, or is the clock of the conductor."""
    monkeypatch.setattr(BACKENDS["torch"], "prepare", tamper(tampering))
    with in_process() as child:
        replicate = measured(standing(child, tmp_path), rounds=1)
    judged = verdict_as_if_alone(replicate)
    notes = dict(zip(judged.reasons, judged.reason_notes, strict=True))
    for reason, words in ATTACKS[tampering].items():
        assert words in notes[VerdictReason(reason)]
    if tampering in ("NotANumber", "LosesOne", "SpoiledLater"):
        assert (replicate.ready.problem is None) == (tampering == "SpoiledLater"), "when it can be seen"


@pytest.mark.slow
def test_a_warm_up_that_sleeps_and_work_in_a_pause_are_found(tmp_path: Path) -> None:
    """It works while other variants are timed, so that these look slow."""
    with standing_ready(tmp_path, program("tampered", "RestsThenHinders")) as process:
        timed = process.timed_rounds(HostMonitor(DeviceKind.CPU, probe(), lambda: {process.child.pid}))
        timed.measure_one(process.progress)
        before_s = used_s(process.child.pid)
        wait_until(lambda: used_s(process.child.pid) > before_s + HINDERED_S)
        timed.measure_one(process.progress)
        replicate = timed.replicate()
    assert replicate.warm_up is not None
    judged = verdict(replace(replicate, warm_up=as_if_alone(replicate.warm_up)))
    notes = dict(zip(judged.reasons, judged.reason_notes, strict=True))
    assert "All CPUs rested for" in notes[VerdictReason.WARM_UP_SLEPT]
    assert "in which it was asked nothing" in notes[VerdictReason.WORKED_WHILE_IDLE]


def used_s(pid: int) -> float:
    """CPU seconds of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def as_if_alone(sample: HostSample) -> HostSample:
    """What would have been counted if nothing else had run on this machine meanwhile."""
    assert None not in (sample.idle_s, sample.foreign_s, sample.steal_s)
    idle_s = (sample.idle_s or 0.0) + (sample.foreign_s or 0.0) + (sample.steal_s or 0.0)
    return replace(sample, idle_s=idle_s, foreign_s=0.0, steal_s=0.0)


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
