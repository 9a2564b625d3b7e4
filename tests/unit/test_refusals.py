"""What backends answer alike."""

import pytest

from optigpu.backends.refusals import allocation_failed, workload_refused
from optigpu.vocabulary import OptiGPUError, OutOfMemoryError
from optigpu.workloads.base import Workload
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate


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
