"""What backends answer alike."""

import pytest

from optigpu.backends.refusals import allocation_failed, packages_missing, workload_refused
from optigpu.hardware import probe
from optigpu.vocabulary import OptiGPUError, OutOfMemoryError
from optigpu.workloads.base import Workload
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate


@pytest.mark.parametrize(
    ("installed", "sentence"),
    [
        ((), "one and two are not installed; install them with: pip install both"),
        (("one",), "two is not installed; install it with: pip install both"),
        (("two", "one"), None),
    ],
)
def test_packages_that_are_missing_are_named_with_their_command(
    installed: tuple[str, ...], sentence: str | None
) -> None:
    environment = probe().model_copy(update={"software": dict.fromkeys(installed, "1")})
    assert packages_missing(("one", "two"), environment, "pip install both") == sentence


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


def test_labelled_images_are_refused() -> None:
    labelled = Classify(images="cats")
    assert "leave images out" in str(workload_refused("engine", labelled, ("classify",)))
    assert workload_refused("engine", Classify(), ("classify",)) is None


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
