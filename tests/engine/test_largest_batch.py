"""The largest batch under a limit of memory: real processes that run out of it and go on."""

from typing import Any

import pytest

from optigpu.conductor.largest_batch import largest_batch
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import ReplicateError
from tests.engine.processes import program

LLAMA = "preset:tiny-llama-test"


def job(*names: str, **workload: Any) -> JobSpec:
    training = {"kind": "train_step", "sequence_tokens": 64} | workload
    stack = [{"name": name} for name in names]
    return JobSpec.model_validate({"workload": training, "model": LLAMA, "stack": stack})


@pytest.mark.slow
def test_checkpointing_lets_a_larger_batch_fit_under_a_real_limit() -> None:
    plain, checkpointed = (
        largest_batch(job(*names), 60_000_000, most=64) for names in ((), ("gradient_checkpointing",))
    )
    assert 1 <= plain.largest < checkpointed.largest
    assert any(not fits for _, fits in plain.tried), "memory ran out"
    assert (plain.tried[-1][0] - plain.largest) in (0, 1), "bisected to the end"


@pytest.mark.parametrize(("bound", "most", "found"), [(0, 64, 0), (5, 64, 5), (64, 64, 64), (100, 64, 64)])
def test_bisection_finds_the_last_batch_that_fits_and_outlives_dying_processes(
    bound: int, most: int, found: int
) -> None:
    measured = largest_batch(job(), 1, most=most, program=program("batches", bound))
    assert measured.largest == found
    assert measured.restarts == sum(not fits for _, fits in measured.tried)


def test_another_error_than_memory_is_told() -> None:
    with pytest.raises(ReplicateError, match="A batch of 1 failed: no such thing"):
        largest_batch(job(), 1, program=program("batches", -1))
