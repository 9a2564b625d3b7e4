"""Every reason of a verdict, provoked from outside around real rounds of a real measuring process.

The machine that runs these tests may itself be busy, so that they say what must be found, and never that nothing else
was: that is said on made-up sights in tests/unit/test_verdict.py, and measured by benchmarks/quiet_runs.py.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from optigpu.conductor.asking import ask
from optigpu.conductor.child import Child
from optigpu.conductor.locks import hold, others_measure
from optigpu.conductor.sampling import Replicate, Sampling, audit
from optigpu.conductor.variables import child_variables
from optigpu.conductor.verdict import judge
from optigpu.conductor.watch import Watch
from optigpu.conductor.witness import Witness
from optigpu.hardware.probe import probe
from optigpu.messages import Assignment, Audited, Ready, RunAudit
from optigpu.plan import variants_of
from optigpu.result import Accelerator, Verdict, VerdictReason
from optigpu.spec import JobSpec
from optigpu.vocabulary import DeviceKind
from tests.engine.processes import program, wait_until

HONEST = (sys.executable, "-P", "-m", "optigpu.replicate")
ROUNDS, ROUND_S = 4, 0.5
SPEC = JobSpec.model_validate(
    {
        "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4},
        "model": "preset:tiny-llama-test",
        "measure": {"min_seconds": ROUNDS * ROUND_S, "max_seconds": 60, "replicates": 1},
    }
)
VARIANT = variants_of(SPEC)[0]

Disturb = Callable[[int, Child], None]
"""Called before each round, with the round's number from 0."""


def leave_alone(number: int, child: Child) -> None:
    """Nothing happens."""


@contextmanager
def standing_ready(folder: Path, command: Sequence[str]) -> Iterator[tuple[Child, Ready, Assignment, Watch]]:
    assignment = Assignment(
        variant=VARIANT,
        environment=probe(),
        measure=SPEC.measure,
        seed=0,
        replicate=0,
        folder=str(folder),
        threads=1,
    )
    watch = Watch(lambda _: None, lambda: None, [0], 1)
    with Child(command, child_variables(1)) as child:
        yield child, ask(child, assignment, Ready, watch), assignment, watch


def measured(
    folder: Path, command: Sequence[str] = HONEST, disturb: Disturb = leave_alone, rounds: int = ROUNDS
) -> Replicate:
    """One replicate as the conductor measures it, with its audit and without meters."""
    own: set[int] = set()
    witness = Witness(DeviceKind.CPU, probe(), lambda: own)
    with standing_ready(folder, command) as (child, ready, assignment, watch):
        own.add(child.pid)
        sampling = Sampling(child, ready, assignment, witness)
        for number in range(rounds):
            disturb(number, child)
            sampling.round(watch)
        return replace(sampling.replicate(), audit=audit(child, ready, watch))


def verdict(replicate: Replicate) -> Verdict:
    return judge(SPEC, VARIANT, [replicate], {})


@contextmanager
def busy_loop(folder: Path, niceness: int) -> Iterator[str]:
    """A process of a name of its own that never rests."""
    script = folder / f"hog{os.getpid()}"
    script.write_text("#!/bin/sh\nwhile :; do :; done\n")
    script.chmod(0o755)
    with subprocess.Popen(["nice", "-n", str(niceness), str(script)]) as process:
        try:
            wait_until(lambda: psutil.Process(process.pid).name() == script.name)
            yield script.name
        finally:
            process.kill()


def test_a_busy_loop_beside_the_run_is_a_foreign_process(tmp_path: Path) -> None:
    with busy_loop(tmp_path, niceness=0) as name:
        replicate = measured(tmp_path)
    used_s = sum(sight.named.get(name, 0.0) for sight in replicate.sights)
    foreign_s = sum(sight.foreign_s or 0.0 for sight in replicate.sights)
    assert used_s > 0.15 * sum(sight.wall_s for sight in replicate.sights)
    assert foreign_s > used_s - 0.1, "all of what it used is in the count"
    judged = verdict(replicate)
    assert VerdictReason.FOREIGN_PROCESS in judged.reasons
    assert any("other processes used" in note for note in judged.notes)


def test_a_busy_loop_of_the_lowest_priority_is_one_too(tmp_path: Path) -> None:
    with busy_loop(tmp_path, niceness=19) as name:
        replicate = measured(tmp_path)
    crowding = frozenset.intersection(*(sight.crowding for sight in replicate.sights))
    assert name in {name for _, _, name in crowding}
    assert VerdictReason.FOREIGN_PROCESS in verdict(replicate).reasons


def test_what_the_measuring_process_uses_is_not_foreign(tmp_path: Path) -> None:
    own: set[int] = set()
    witness = Witness(DeviceKind.CPU, probe(), lambda: own)
    with standing_ready(tmp_path, HONEST) as (child, ready, assignment, watch):
        own.add(child.pid)
        sampling = Sampling(child, ready, assignment, witness)
        times, before = psutil.Process(child.pid).cpu_times(), witness.look()
        for _ in range(ROUNDS):
            sampling.round(watch)
        after, later = witness.look(), psutil.Process(child.pid).cpu_times()
        name = psutil.Process(child.pid).name()
    sight = witness.between(before, after)
    assert before.cpu is not None
    assert after.cpu is not None
    assert sight.foreign_s is not None
    used_s = later.user + later.system - times.user - times.system
    assert used_s > 0.1
    assert sight.foreign_s <= after.cpu.work_s - before.cpu.work_s - used_s + 0.1
    own.clear()
    stranger = Witness(DeviceKind.CPU, probe(), lambda: own)
    seen = stranger.between(replace(before, own=frozenset()), replace(after, own=frozenset()))
    assert seen.foreign_s == pytest.approx(sight.foreign_s + used_s, abs=0.1), (
        "it was ours because we said so"
    )
    assert seen.named[name] - sight.named.get(name, 0.0) == pytest.approx(used_s, abs=0.1)


def test_a_machine_that_slows_down_half_way_is_drift(tmp_path: Path) -> None:
    """From the ninth of ten rounds on, which is half of the time, the process is stopped again and again."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def disturb(number: int, child: Child) -> None:
        if number == 2 * ROUNDS:
            threads.append(threading.Thread(target=hamper, args=(child.pid, over)))
            threads[0].start()

    try:
        judged = verdict(measured(tmp_path, disturb=disturb, rounds=2 * ROUNDS + 2))
    finally:
        over.set()
        threads[0].join()
    assert VerdictReason.DRIFT in judged.reasons
    assert any("became slower" in note for note in judged.notes)


def hamper(pid: int, over: threading.Event) -> None:
    """Lets the process run a fifth of the time, in slices so short that each of its requests meets several."""
    with suppress(ProcessLookupError):
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.004)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.001)


def test_a_process_that_is_stopped_in_a_round_was_interrupted(tmp_path: Path) -> None:
    """It is stopped three times, since the first one may hit what precedes the requests of a round."""
    threads: list[threading.Thread] = []

    def disturb(number: int, child: Child) -> None:
        if number == ROUNDS:
            threads.append(threading.Thread(target=interrupt, args=(child.pid,)))
            threads[0].start()

    try:
        judged = verdict(measured(tmp_path, disturb=disturb, rounds=ROUNDS + 1))
    finally:
        threads[0].join()
    assert VerdictReason.INTERRUPTED in judged.reasons
    assert any("stood still" in note for note in judged.notes)


def interrupt(pid: int) -> None:
    with suppress(ProcessLookupError):
        for _ in range(3):
            time.sleep(0.3)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(3.0)
            os.kill(pid, signal.SIGCONT)


def test_an_answer_from_memory_is_a_cached_result(tmp_path: Path) -> None:
    judged = verdict(measured(tmp_path, program("tampered", "Remembers")))
    assert VerdictReason.CACHED_RESULT in judged.reasons
    assert VerdictReason.OUTPUT_INVALID not in judged.reasons, "what it gives is right"


def test_an_honest_process_answers_fresh_inputs_as_fast(tmp_path: Path) -> None:
    with standing_ready(tmp_path, HONEST) as (child, ready, assignment, watch):
        sampling = Sampling(child, ready, assignment, Witness(DeviceKind.CPU, probe(), set))
        for _ in range(ROUNDS):
            sampling.round(watch)
        fresh = ask(child, RunAudit(requests=20), Audited, watch)
    assert VerdictReason.CACHED_RESULT not in verdict(replace(sampling.replicate(), audit=fresh)).reasons


@pytest.mark.parametrize(
    ("tampering", "words"),
    [
        ("NotANumber", "NaN or infinite"),
        ("LosesOne", "instead of (1, 4)"),
        ("SpoiledLater", "NaN or infinite"),
    ],
)
def test_an_output_that_is_none_is_invalid(tmp_path: Path, tampering: str, words: str) -> None:
    replicate = measured(tmp_path, program("tampered", tampering))
    judged = verdict(replicate)
    assert VerdictReason.OUTPUT_INVALID in judged.reasons
    assert words in " ".join(judged.notes)
    assert (replicate.ready.problem is None) == (tampering == "SpoiledLater"), "when it can be seen"


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
def inside_a_quota() -> Iterator[None]:
    """This process, and what it starts, in a group with a quota."""
    before = group_folder() / _own_group().lstrip("/") / "cgroup.procs"
    folder = make_group("quota")
    assert folder is not None
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    yield
    before.write_text(str(os.getpid()))
    wait_until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def _own_group() -> str:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return next(
        path for number, names, path in lines if "cpu" in names.split(",") or (number, names) == ("0", "")
    )


@pytest.mark.skipif(not can_make_groups(), reason="no control group can be made here: it takes root")
def test_a_quota_of_cpu_time_throttles(tmp_path: Path, inside_a_quota: None) -> None:
    judged = verdict(measured(tmp_path))
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
