"""What all backends refuse alike, and how they say that memory is short."""

from types import SimpleNamespace

import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.engine import allocation_failed
from optigpu.vocabulary import OptiGPUError, OutOfMemoryError
from optigpu.workloads.base import Workload
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate


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
        (Classify(), "coreml does not run the workload classify; it runs generate, quality."),
        (Generate(prompt="The old man"), "leave prompt, temperature and top_p out"),
        (Generate(temperature=1), "leave prompt, temperature and top_p out"),
    ],
)
def test_a_workload_that_is_refused_says_what_to_change(workload: Workload, said: str | None) -> None:
    found = BACKENDS["coreml"].supports(workload, None)
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
