"""The memory of training, predicted by running the step on shapes alone, beside what a step allocates."""

import json
from typing import Any

import pytest

from optigpu.backends.torch.training.predicted import predicted_need
from optigpu.backends.training import TrainingBatch, UpdateRule
from optigpu.documents.shapes import ImageFacts
from optigpu.fit.training import fit_training
from optigpu.hardware.cards import gpu_of
from optigpu.job.spec import resolve
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.requests.training import DrawnImages, DrawnTexts
from tests.engine.training import GPT2, LLAMA, RESNET, VIT, trained

RULE = UpdateRule("adamw", 1e-4)


def samples(facts: Any, documents: int = 8, length: int = 64) -> TrainingBatch:
    if isinstance(facts, ImageFacts):
        return DrawnImages(facts, facts.image_size, 0).batch(documents)
    return DrawnTexts(facts, 0).batch(documents, length, length)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [
        (LLAMA, ()),
        (GPT2, ()),
        (LLAMA, ("mixed_precision",)),
        (LLAMA, ("gradient_checkpointing",)),
        (GPT2, ("gradient_checkpointing", "mixed_precision")),
        (LLAMA, ("gradient_accumulation",)),
        (LLAMA, ("optimizer_in_backward",)),
        (LLAMA, ("fused_optimizer",)),
        (VIT, ()),
        (RESNET, ()),
    ],
)
def test_a_step_s_peak_is_within_a_twentieth_of_the_measured_one(model: str, names: tuple[str, ...]) -> None:
    stack = resolve((TECHNIQUES[name](name=name) for name in names), "train_step")
    (need,) = predicted_need(RULE, model, stack, (samples,))
    runtime = trained(model, *stack, batch_size=8)
    batch = samples(runtime.facts)
    runtime.step(batch)
    measured = runtime.peak_memory(lambda: runtime.step(batch)).allocated_bytes
    assert measured is not None
    assert need.peak_bytes == pytest.approx(measured, rel=0.05)
    assert need.weight_bytes == runtime.weights().bytes


def test_a_step_that_depends_on_numbers_is_not_predicted() -> None:
    scaled = TECHNIQUES["mixed_precision"].model_validate({"name": "mixed_precision", "dtype": "float16"})
    with pytest.raises(UnsupportedError, match="training with mixed_precision cannot be told from shapes"):
        predicted_need(RULE, LLAMA, (scaled,), (samples,))


@pytest.mark.slow
def test_the_largest_batch_follows_from_the_bytes_of_a_sample() -> None:
    stacks = [[], [{"name": "gradient_checkpointing"}]]
    card = gpu_of("rtx4060")
    found = fit_training(LLAMA, card, stacks, batch=4, sequence_tokens=32, reserve_bytes=0)
    plain, checkpointed = found.stacks
    assert plain.fits
    assert (checkpointed.largest_batch or 0) > (plain.largest_batch or 0) > 1000
    assert plain.state_bytes == pytest.approx(2 * (plain.weight_bytes or 0), rel=0.01)
    assert json.loads(found.model_dump_json())["basis"] == "predicted"
