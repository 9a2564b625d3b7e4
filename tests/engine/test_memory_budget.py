"""Whether another process fits, by what the largest one holds. Memory that is free is made up."""

import os
from collections.abc import Iterator

import psutil
import pytest

from optigpu.conductor.processes.memory_budget import HOST_SLACK, RESERVE, MemoryBudget
from optigpu.documents.result import Accelerator
from optigpu.hardware.probe import probe
from optigpu.vocabulary import DeviceKind

GPU = Accelerator(name="g", memory_bytes=100, uuid="GPU-a")
MACHINE = probe().model_copy(update={"accelerators": (GPU,)})
PLENTY = 2**60
NOBODY = 2**22 + 1
"""No process has this id: it is above the largest one that Linux gives."""


def cpu_budget(host_free: int) -> MemoryBudget:
    return MemoryBudget(DeviceKind.CPU, MACHINE, host_free=lambda: host_free)


def gpu_budget(*free: int | None) -> MemoryBudget:
    """A budget that finds so much GPU memory free, one number after the other."""
    found: Iterator[int | None] = iter(free)
    return MemoryBudget(DeviceKind.CUDA, MACHINE, host_free=lambda: PLENTY, gpu_free=lambda _: next(found))


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (2**30, False)])
def test_the_host_must_have_free_what_the_largest_process_holds_and_more(missing: int, fits: bool) -> None:
    held = psutil.Process().memory_info().rss
    # This process grows a little between the two looks at it.
    budget = cpu_budget(int(RESERVE * (held + 2**26)) + HOST_SLACK - missing)
    budget.add(os.getpid())
    assert budget.has_space() is fits


def test_a_process_that_has_ended_holds_nothing() -> None:
    budget = cpu_budget(HOST_SLACK)
    budget.add(NOBODY)
    assert budget.has_space()


def test_before_the_first_process_some_slack_is_enough() -> None:
    assert cpu_budget(HOST_SLACK).has_space()
    assert not cpu_budget(HOST_SLACK - 1).has_space()


def test_the_gpu_must_have_free_what_the_largest_process_took() -> None:
    # Before: 100; the first takes 30, the second 10; twice 30 must be free.
    budget = gpu_budget(100, 70, 60, 60)
    budget.add(NOBODY)
    budget.add(NOBODY)
    assert budget.has_space()
    budget = gpu_budget(100, 70, 59, 59)
    budget.add(NOBODY)
    budget.add(NOBODY)
    assert not budget.has_space()


def test_a_gpu_that_does_not_tell_its_memory_gets_one_process_at_a_time() -> None:
    budget = gpu_budget(None, None, None)
    budget.add(NOBODY)
    assert not budget.has_space()


def test_a_job_on_the_cpu_does_not_ask_the_gpu() -> None:
    def ask(uuid: str) -> int:
        pytest.fail("it asked for the GPU's memory")

    budget = MemoryBudget(DeviceKind.CPU, MACHINE, host_free=lambda: PLENTY, gpu_free=ask)
    budget.add(NOBODY)
    assert budget.has_space()
