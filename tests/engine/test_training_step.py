"""A step of training: how samples are arranged, and that losses, gradients and weights are those of plain torch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from optigpu.backends.torch.clock import CpuClock
from optigpu.backends.torch.training.model import padded_rows, turn_off_dropout
from optigpu.backends.torch.training.step import Trainer
from optigpu.backends.training import NO_TARGET, LabelledImages, Texts, UpdateRule
from optigpu.models.loading.load import load_image_model, load_model
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import UnsupportedError
from tests.engine.training import (
    GPT2,
    LLAMA,
    RESNET,
    VIT,
    batch_for,
    images_for,
    losses_of,
    texts_for,
    trained,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
MODELS = (LLAMA, GPT2, RESNET, VIT)


def plain(model: str) -> Any:
    """The model as the library has it, ready to be trained in a loop of the test's own."""
    load = load_image_model if model in (RESNET, VIT) else load_model
    made = load(parse_reference(model), device="cpu", dtype="float32")
    made.train().requires_grad_(True)
    turn_off_dropout(made)
    return made


def mean_loss(model: Any, batch: Texts | LabelledImages) -> Any:
    """Of a plain model: each document by itself, without padding."""
    if isinstance(batch, LabelledImages):
        logits = model(pixel_values=torch.from_numpy(batch.images)).logits
        return cross_entropy(logits, torch.from_numpy(batch.labels))
    losses = [
        cross_entropy(
            model(input_ids=torch.from_numpy(document)[None]).logits[0, :-1],
            torch.from_numpy(document)[1:],
            reduction="sum",
        )
        for document in batch.documents
    ]
    return sum(losses) / sum(len(document) - 1 for document in batch.documents)


def test_a_row_is_a_document_with_the_next_tokens_as_labels() -> None:
    texts = Texts((np.array([5, 6, 7]), np.array([8, 9, 1, 2])), 4)
    ids, labels = padded_rows(texts)
    assert ids.tolist() == [[5, 6, 7, 0], [8, 9, 1, 2]]
    assert labels.tolist() == [[6, 7, NO_TARGET, NO_TARGET], [9, 1, 2, NO_TARGET]]


@pytest.mark.parametrize("model", MODELS)
def test_two_steps_are_those_of_a_loop_that_pads_nothing(model: str) -> None:
    runtime, reference = trained(model, learning_rate=1e-2), plain(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for seed in range(2):
        batch = batch_for(runtime, seed=seed)
        optimizer.zero_grad()
        loss = mean_loss(reference, batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in reference.parameters()])
        assert runtime.gradient_norm(batch) == pytest.approx(float(norm), rel=1e-4)
        assert runtime.step(batch).loss == pytest.approx(loss.item(), rel=1e-5)
        optimizer.step()
    for ours, theirs in zip(weights_of(runtime), reference.parameters(), strict=True):
        # AdamW's first steps are as long for the smallest gradients, whose sign rounding decides.
        assert float((ours - theirs.detach()).abs().mean()) < 1e-4


def test_sgd_moves_weights_along_the_gradient() -> None:
    runtime, reference = trained(LLAMA, optimizer="sgd", learning_rate=0.5), plain(LLAMA)
    batch = texts_for(runtime)
    mean_loss(reference, batch).backward()
    runtime.step(batch)
    for ours, theirs in zip(weights_of(runtime), reference.parameters(), strict=True):
        assert ours.allclose(theirs.detach() - 0.5 * theirs.grad, atol=1e-5)


@pytest.mark.parametrize("model", [LLAMA, RESNET])
def test_a_restart_brings_everything_back(model: str) -> None:
    runtime = trained(model, learning_rate=1e-2)
    first = losses_of(runtime)
    assert len(set(first)) == 3
    runtime.restart()
    assert (losses_of(runtime) == first).all()


def test_the_norm_of_a_gradient_changes_no_weight() -> None:
    runtime = trained(LLAMA)
    before, batch = weights_of(runtime), texts_for(runtime)
    assert runtime.gradient_norm(batch) == runtime.gradient_norm(batch) > 0
    assert all(map(torch.equal, before, weights_of(runtime)))
    assert all(weight.grad is None for weight in runtime.training.trainer.weights)


def test_every_part_of_a_step_takes_time_and_padding_is_computed() -> None:
    runtime = trained(GPT2)
    texts = texts_for(runtime, documents=3, length=16, shortest=2)
    step = runtime.step(texts)
    assert min(step.data_s, step.forward_s, step.backward_s, step.optimizer_s) > 0
    assert step.computed_tokens == 48 > sum(map(len, texts.documents))
    images = trained(RESNET)
    assert images.step(images_for(images)).computed_tokens == 0


def test_dropout_is_off_wherever_a_model_has_it() -> None:
    runtime = trained(GPT2)
    assert runtime.notes.facts["dropout"] == {"now": 0.0, "of the model": {"Dropout.p": 0.1}}
    assert runtime.training.model.training
    batch = texts_for(runtime)
    assert runtime.gradient_norm(batch) == runtime.gradient_norm(batch), "nothing is drawn"


class Paths(torch.nn.Module):
    """As transformers keeps them: a layer, and numbers for functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.attention_dropout, self.layerdrop = torch.nn.Dropout(0.5), 0.2, 0.1


def test_dropout_is_found_in_layers_and_in_numbers() -> None:
    paths = Paths()
    assert turn_off_dropout(paths) == {
        "Paths.attention_dropout": 0.2,
        "Paths.layerdrop": 0.1,
        "Dropout.p": 0.5,
    }
    assert (paths.layer.p, paths.attention_dropout, paths.layerdrop) == (0, 0, 0)
    assert turn_off_dropout(paths) == {}


def unchanged(loss: Any) -> Any:
    return loss


def through_float16(loss: Any) -> Any:
    """Gradients overflow on their way back, at a scale of 65,536 and not at 1,024."""
    return 1000 * loss.half().float()


def trainer_with(change: Any = unchanged, **changes: Any) -> tuple[Trainer, Texts]:
    """What trains a model with other parts than its own and with changed losses, and samples."""
    runtime = trained(LLAMA, optimizer="sgd", learning_rate=1.0)
    model = runtime.training
    parts = model.trainer.parts
    changed = parts.but(loss=lambda rows: change(parts.loss(rows)), **changes)
    return Trainer(model.model, changed, "cpu"), texts_for(runtime)


def moved(trainer: Trainer, batch: Texts) -> float:
    """How far a step moves the weights together."""
    before = [weight.detach().clone() for weight in trainer.weights]
    trainer.step(batch, CpuClock())
    return float(
        torch.nn.utils.get_total_norm(
            [now.detach() - old for now, old in zip(trainer.weights, before, strict=True)]
        )
    )


def test_scaled_losses_give_the_same_step() -> None:
    trainer, batch = trainer_with()
    scaled, _ = trainer_with(loss_scaling=True)
    assert scaled.gradient_norm(batch) == pytest.approx(trainer.gradient_norm(batch), rel=1e-5)
    assert moved(scaled, batch) == pytest.approx(moved(trainer, batch), rel=1e-5)


def test_a_step_whose_gradient_is_not_finite_is_left_out_and_the_scale_halved() -> None:
    trainer, batch = trainer_with(through_float16, loss_scaling=True)
    before = trainer.gradient_norm(batch)
    assert before < float("inf"), "it is read at a smaller scale"
    assert moved(trainer, batch) == 0
    assert trainer.loss_scale == 2**15
    assert all(weight.grad is None for weight in trainer.weights)


def test_a_clipped_gradient_is_no_longer_than_the_limit() -> None:
    trainer, batch = trainer_with(loss_scaling=True, clip_norm=0.25)
    norm = trainer.gradient_norm(batch)
    assert norm > 0.25, "before clipping"
    assert moved(trainer, batch) == pytest.approx(0.25, rel=1e-4)


def test_what_needs_the_whole_gradient_cannot_be_updated_piece_by_piece() -> None:
    with pytest.raises(UnsupportedError, match="leave optimizer_in_backward out"):
        trainer_with(in_backward=True, clip_norm=1.0)


def test_a_model_that_is_frozen_cannot_be_trained() -> None:
    runtime = trained(LLAMA)
    model = runtime.training.model.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="No weight of this model requires a gradient"):
        Trainer(model, runtime.training.trainer.parts, "cpu")


def test_parts_of_samples_are_as_large_as_each_other() -> None:
    runtime = trained(VIT)
    images = images_for(runtime, 6)
    first, second, third = images.split(3)
    assert np.array_equal(np.concatenate([first.images, second.images, third.images]), images.images)
    assert second.labels.tolist() == images.labels[2:4].tolist()
    texts = texts_for(trained(LLAMA), documents=4)
    assert [len(part.documents) for part in texts.split(2)] == [2, 2]
    assert texts.split(2)[1].documents[0] is texts.documents[2]


def test_the_rule_is_the_workload_s() -> None:
    parts = trained(LLAMA, optimizer="sgd", learning_rate=0.25).training.trainer.parts
    assert parts.rule == UpdateRule("sgd", 0.25)
