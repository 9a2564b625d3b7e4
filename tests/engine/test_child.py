"""The conductor's side of a measuring process, against real processes that behave well and badly."""

import os
import tempfile
from functools import partial
from pathlib import Path

import pytest

from optigpu.child.messages import Answer, Assignment, Metered, Progress, Ready, Round, RunMeter, RunRound
from optigpu.conductor.processes import child as child_module
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.variables import child_variables
from optigpu.hardware.cgroup import oom_kills
from optigpu.hardware.probe import probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import Frozen, OutOfMemoryError, ReplicateError
from tests.engine.processes import is_alive, program, wait_until

SPEC = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "preset:tiny-llama-test"})
ASSIGNMENT = Assignment(
    variant=variants_of(SPEC)[0],
    environment=probe(),
    measure=SPEC.measure,
    seed=0,
    replicate=0,
    folder=tempfile.gettempdir(),
    threads=1,
)


def start(name: str, *arguments: object, keep: tuple[int, ...] = ()) -> Child:
    child = Child(program(name, *arguments), child_variables(1), keep)
    child.tell(ASSIGNMENT)
    return child


def next_answer(child: Child) -> Answer:
    while True:
        answer = child.listen()
        if answer is not None and not isinstance(answer, Progress):
            return answer


def ask(child: Child, message: Frozen) -> Answer:
    child.tell(message)
    return next_answer(child)


def test_a_conversation_from_the_assignment_to_the_end() -> None:
    with start("well_behaved") as child:
        assert isinstance(next_answer(child), Ready)
        first = ask(child, RunRound(seconds=0.1))
        assert isinstance(first, Round)
        assert set(first.samples) == set(SPEC.workload.metrics)
        assert isinstance(ask(child, RunMeter(meter="memory")), Metered)
        assert child.end(60) == 0
    assert not is_alive(child.pid)


def test_silence_gives_the_caller_a_turn() -> None:
    with start("interrupted", "/tmp") as child:
        assert child.listen() is None


def test_full_pipes_on_all_sides_do_not_lock_up() -> None:
    with start("chatty") as child:
        for _ in range(200):
            child.tell(RunRound(seconds=0.001))  # more than a pipe holds, before the first is read
        assert isinstance(next_answer(child), Ready)
        assert all(isinstance(next_answer(child), Round) for _ in range(200))


@pytest.mark.parametrize("kind", ["text", "binary", "unknown", "nan"])
def test_garbage_is_refused_with_what_was_printed(kind: str) -> None:
    with (
        start("garbage", kind) as child,
        pytest.raises(ReplicateError, match="sent an invalid message") as raised,
    ):
        next_answer(child)
    assert "help" in str(raised.value)
    assert not {"\x00", "\x1b"} & set(str(raised.value)), "no database and no terminal wants these"


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "LONGEST_LINE", 1024)
    with start("garbage", "endless") as child, pytest.raises(ReplicateError, match="message of more than"):
        next_answer(child)


@pytest.mark.parametrize(
    ("how", "words"),
    [("3", "ended with status 3"), ("0", "ended with status 0"), ("SIGSEGV", "killed by signal 11")],
)
def test_a_death_is_reported_with_its_cause_and_the_last_words(how: str, words: str) -> None:
    with start("dying", how, 0) as child:
        next_answer(child)
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
        next_answer(child)
        with pytest.raises(ReplicateError, match="killed by signal 9"):
            ask(child, RunRound(seconds=1))
    with start("dying", "SIGKILL", 0, counter) as child:
        next_answer(child)
        with pytest.raises(OutOfMemoryError, match="out of memory: the kernel"):
            ask(child, RunRound(seconds=1))


def test_the_kernel_kills_for_memory(small_group: Path) -> None:
    with (
        start("hungry", small_group) as child,
        pytest.raises(OutOfMemoryError, match="out of memory: the kernel"),
    ):
        next_answer(child)


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
            assert isinstance(next_answer(child), Ready)
        else:  # one of its processes holds the answers' pipe open: its death is found out all the same
            with pytest.raises(ReplicateError, match="killed by signal 9"):
                next_answer(child)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert not any(is_alive(pid) for pid in (child.pid, *pids))


@pytest.mark.slow
def test_leaving_by_an_exception_ends_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), start("deaf", tmp_path / "pid") as child:
        raise KeyboardInterrupt
    assert not is_alive(child.pid)


def test_no_descriptor_is_left() -> None:
    before = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
    with start("well_behaved") as child:
        next_answer(child)
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
        ready = next_answer(child)
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
