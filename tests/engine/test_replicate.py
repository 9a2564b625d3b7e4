"""python -m optigpu.child.replicate, as the conductor runs it: real processes, real answers."""

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from optigpu.child.connection import broken
from optigpu.child.harness import Harness
from optigpu.child.messages import (
    Answer,
    Assignment,
    Begin,
    Broken,
    Metered,
    Progress,
    Ready,
    Refused,
    Round,
    RunMeter,
    RunRound,
    Started,
)
from optigpu.child.replicate import Subject, metered
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.confinement import child_variables
from optigpu.documents.result import Environment
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.meters.base import Reading
from optigpu.vocabulary import Frozen
from optigpu.workloads.generate import Generate
from tests.engine.machines import here
from tests.engine.measuring import in_process
from tests.engine.meter_contexts import doing
from tests.engine.processes import is_alive, wait_until

PROGRAM = (sys.executable, "-m", "optigpu.child.replicate")
GENERATE = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4}
ENDLESS = RunRound(seconds=3600)


def assignment(
    workload: dict[str, Any], model: str | None, *stack: str | dict[str, Any], **environment: Any
) -> Assignment:
    """Techniques are given by their names, or with their parameters."""
    named = [{"name": each} if isinstance(each, str) else each for each in stack]
    spec = JobSpec.model_validate({"workload": workload, "model": model, "stack": named})
    return assigned(spec, here().model_copy(update=environment))


def assigned(spec: JobSpec, environment: Environment) -> Assignment:
    """The job's first variant."""
    return Assignment(
        variant=variants_of(spec)[0],
        environment=environment,
        measure=spec.measure,
        seed=0,
        replicate=0,
        folder=tempfile.gettempdir(),
        threads=1,
    )


@contextmanager
def child_with(work: Assignment) -> Iterator[Child]:
    with Child(PROGRAM, child_variables(1)) as child:
        child.tell(work)
        yield child


def answer(child: Child) -> Answer:
    """The next answer that is not progress; the test's own time limit ends a wait for one that never comes."""
    while True:
        heard = child.listen()
        if heard is not None and not isinstance(heard, Progress):
            return heard


def ask(child: Child, command: Frozen) -> Answer:
    child.tell(command)
    return answer(child)


@pytest.mark.slow
def test_a_generation_is_loaded_timed_and_weighed_until_stdin_ends_in_the_middle_of_a_request() -> None:
    with child_with(assignment(GENERATE, "preset:tiny-llama-test", "int8_weight_only")) as child:
        ready = answer(child)
        assert isinstance(ready, Ready)
        assert (ready.problem, ready.compile_s) == (None, None)
        assert ready.facts.recorded["int8_layers"] == 15
        heard = ask(child, RunRound(seconds=0, min_requests=3))
        assert isinstance(heard, Round)
        assert {name: len(values) for name, values in heard.samples.items()} == dict.fromkeys(
            Generate.metrics, 3
        )
        metered = ask(child, RunMeter(meter="memory"))
        assert isinstance(metered, Metered)
        assert metered.values["params_total"] == 361_088
        child.tell(ENDLESS)
        child.listen()
        assert child.end(5) == 0


@pytest.fixture(scope="module")
def multiplying() -> Iterator[Child]:
    """A ready process with two threads and no model."""
    work = assignment({"kind": "matmul", "sizes": [256]}, None).model_copy(update={"threads": 2})
    with child_with(work) as child:
        assert isinstance(answer(child), Ready)
        yield child


@pytest.mark.slow
def test_what_is_known_beforehand_is_refused_before_torch_is_loaded() -> None:
    work = assignment(GENERATE, "preset:gpt2", "torch_compile", compiler=None)
    with child_with(work) as child:
        heard = answer(child)
        assert isinstance(heard, Refused)
        assert "C++ compiler" in heard.reason
        assert not any("libtorch" in mapped.path for mapped in psutil.Process(child.pid).memory_maps())
        assert child.end(5) == 0


def test_a_model_whose_context_is_too_short_is_refused_once_it_is_read(models_dir: Path) -> None:
    with in_process() as child:
        child.tell(assignment(GENERATE | {"prompt_tokens": 100}, "path:gpt2"))
        heard = answer(child)
        assert isinstance(heard, Refused)
        assert "context of 64 tokens" in heard.reason


@pytest.mark.slow
def test_an_unknown_meter_breaks_that_command_alone(multiplying: Child) -> None:
    heard = ask(multiplying, RunMeter(meter="weather"))
    assert isinstance(heard, Broken)
    assert (heard.fault, "no meter 'weather'" in heard.reason) == ("error", True)
    assert isinstance(ask(multiplying, RunRound(seconds=0)), Round)


def read_by(reading: Reading) -> Metered:
    """What a meter that reads this answers."""
    work = assignment({"kind": "matmul", "sizes": [8]}, None)
    context, _ = doing(Path(work.folder), lambda: None)
    return metered("memory", Subject(context.runtime, context.request, work, Harness()), lambda _: reading)


@pytest.mark.slow
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_metric_that_is_no_number_has_a_reason_and_spares_the_others(number: float) -> None:
    heard = read_by(Reading({"peak_bytes": number, "host_peak_bytes": 5.0}, {"weight_bytes": "no model"}))
    assert heard.values == {"host_peak_bytes": 5.0}
    assert heard.reasons == {
        "weight_bytes": "no model",
        "peak_bytes": f"The memory meter read {number}, which is not a finite number.",
    }


@pytest.mark.slow
def test_it_ends_when_its_parent_dies_though_stdin_stays_open() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'optigpu.child.replicate', '--answers-fd', '2'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=reading, stdout=subprocess.PIPE, env=child_variables(1), text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: score(pid) == 1000)  # it has set itself up
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
    os.close(reading)
    os.close(writing)


@pytest.mark.slow
def test_what_the_model_prints_goes_to_stderr_and_its_compilers_hold_no_pipe() -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [*PROGRAM, "--answers-fd", str(writing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[writing],
        env=child_variables(1),
    ) as child:
        wait_until(lambda: is_same_file(child.pid, 1, 2))
        flags = Path(f"/proc/{child.pid}/fdinfo/{writing}").read_text().split("flags:")[1].split()[0]
        assert int(flags, 8) & os.O_CLOEXEC
        child.communicate()
    assert child.returncode == 0
    os.close(reading)
    os.close(writing)


def test_every_way_of_running_out_of_memory_is_called_that() -> None:
    import torch

    with pytest.raises(RuntimeError) as hosts:
        torch.empty(2**50)
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), hosts.value):
        assert (broken(error).fault, broken(error).trace) == ("out_of_memory", "")


def score(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
    except OSError:
        return None


def is_same_file(pid: int, first: int, second: int) -> bool:
    folder = Path(f"/proc/{pid}/fd")
    return os.readlink(folder / str(first)) == os.readlink(folder / str(second))


@pytest.mark.slow
def test_libraries_are_imported_before_the_assignment_if_that_is_asked_for() -> None:
    with Child(PROGRAM, child_variables(1)) as child:
        assert isinstance(ask(child, Begin(backend="torch", model=False)), Started)
        assert any("libtorch" in mapped.path for mapped in psutil.Process(child.pid).memory_maps())
        ready = ask(child, assignment({"kind": "matmul", "sizes": [64]}, None))
        assert isinstance(ready, Ready)


@pytest.mark.slow
def test_a_library_that_is_missing_is_refused_with_the_assignment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('There is none.')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    work = assignment(GENERATE, "preset:gpt2")
    elsewhere = work.variant.model_copy(update={"backend": "llama_cpp"})
    bare = work.environment.model_copy(update={"software": {}})
    with Child(PROGRAM, child_variables(1)) as child:
        assert isinstance(ask(child, Begin(backend="llama_cpp", model=True)), Started)
        heard = ask(child, work.model_copy(update={"variant": elsewhere, "environment": bare}))
        assert isinstance(heard, Refused)
        assert "llama-cpp-python" in heard.reason
