"""The seam of backends: what is asked of one before it is loaded, and what all refuse alike."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.refusals import allocation_failed, workload_refused
from optigpu.child.messages import Assignment, Progress
from optigpu.child.replicate import order_of, prepare, refusal
from optigpu.documents.result import Environment
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.vocabulary import DeviceKind, OptiGPUError, OutOfMemoryError, UnsupportedError
from optigpu.workloads.base import Workload
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate

HERE = Environment(hardware_class="c", host_id="h", cpu_model="m", cpu_cores=2, memory_bytes=1, os="o")
JOB = {"workload": {"kind": "generate"}, "model": "preset:gpt2", "stack": [{"name": "bf16"}]}


class Elsewhere:
    """A backend that is installed on some machines and generates on a CPU alone."""

    name, summary, devices = "elsewhere", "another engine", (DeviceKind.CPU,)

    def __init__(self, installed: bool = True) -> None:
        self.installed = installed
        self.asked: list[Any] = []

    def missing(self, environment: Environment) -> str | None:
        return None if self.installed else "elsewhere is not installed; run: pip install elsewhere"

    def supports(self, workload: Any, technique: Any) -> str | None:
        return None if workload.kind == "generate" else f"elsewhere does not run {workload.kind}."

    def use_threads(self, count: int) -> None:
        self.asked.append(count)

    def start(self, *, model: bool) -> None:
        self.asked.append(model)

    def prepare(self, order: Any, progress: Any) -> Any:
        self.asked.append(order)
        raise UnsupportedError("It was asked.")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """Replaces the backend that a job's name finds."""
    backend = Elsewhere()
    monkeypatch.setitem(BACKENDS, "torch", backend)
    monkeypatch.setattr(Bf16, "backends", ("torch",))
    return backend


def assignment(folder: Path) -> Assignment:
    spec = JobSpec.model_validate(JOB)
    return Assignment(
        variant=variants_of(spec)[0],
        environment=HERE,
        measure=spec.measure,
        seed=3,
        replicate=0,
        folder=str(folder),
        threads=2,
    )


def test_the_backend_of_the_variant_prepares_the_whole_order(elsewhere: Elsewhere, tmp_path: Path) -> None:
    work = assignment(tmp_path)
    said: list[Any] = []
    with pytest.raises(UnsupportedError, match="It was asked"):
        prepare(work, said.append)
    assert elsewhere.asked == [2, True, order_of(work)]
    order = elsewhere.asked[2]
    assert (order.model, order.seed, order.threads, order.folder) == ("preset:gpt2", 3, 2, tmp_path)
    assert [technique.name for technique in order.stack] == ["bf16"]
    assert order.environment is HERE
    assert all(isinstance(each, Progress) for each in said)


def test_a_backend_that_is_not_there_is_refused_with_the_command_that_helps(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    assert refusal(assignment(tmp_path)) is None
    elsewhere.installed = False
    assert refusal(assignment(tmp_path)) == "elsewhere is not installed; run: pip install elsewhere"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": {"kind": "prefill"}, "stack": []}, "backend: elsewhere does not run prefill."),
        ({"device": "cuda", "stack": []}, "backend: torch runs on cpu, not on cuda"),
    ],
)
def test_what_a_backend_does_not_run_is_refused_when_a_job_is_posted(
    changes: dict[str, Any], words: str, elsewhere: Elsewhere
) -> None:
    with pytest.raises(ValueError, match=words):
        JobSpec.model_validate(JOB | changes)


def test_the_torch_backend_knows_each_way_in_which_torch_says_that_memory_is_short() -> None:
    torch = BACKENDS["torch"]
    named = type("OutOfMemoryError", (RuntimeError,), {})
    for error in (named("x"), RuntimeError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: no")):
        assert torch.is_out_of_memory(error)
    assert not torch.is_out_of_memory(RuntimeError("another"))
    assert torch.missing(SimpleNamespace()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (Generate(), None),
        (Classify(), "engine does not run the workload classify; it runs generate, quality."),
        (Generate(prompt="The old man"), "leave prompt, temperature and top_p out"),
        (Generate(temperature=1), "leave prompt, temperature and top_p out"),
    ],
)
def test_a_workload_that_is_refused_says_what_to_change(workload: Workload, said: str | None) -> None:
    found = workload_refused("engine", workload, ("generate", "quality"))
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("no room"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("Failed to allocate memory for requested buffer"), True),
        (RuntimeError("no such operator"), False),
        (OptiGPUError("no such file"), False),
    ],
)
def test_an_allocation_that_failed_is_told_from_other_errors(error: Exception, ran_out: bool) -> None:
    assert allocation_failed(error) is ran_out
