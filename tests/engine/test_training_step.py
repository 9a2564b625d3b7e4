"""A step of training: losses, gradients and weights are those of plain torch; its operations, bytes and weights."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from optigpu.backends.torch.device import NO_ACCELERATOR
from optigpu.backends.torch.training_step import Trainer, turn_off_dropout
from optigpu.backends.training import LabelledImages, StepFlops, Texts
from optigpu.models.loading.load import load_image_model, load_model
from optigpu.models.reference import PRESETS, Preset, parse_reference
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from optigpu.vocabulary import UnsupportedError
from tests.engine.training import (
    GPT2,
    LLAMA,
    RESNET,
    VIT,
    batch_for,
    images_for,
    losses_of,
    moved,
    peak_of_texts,
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


@pytest.mark.parametrize("model", [LLAMA, RESNET])
def test_a_restart_brings_everything_back(model: str) -> None:
    runtime = trained(model, learning_rate=1e-2)
    first = losses_of(runtime)
    assert len(set(first)) == 3
    runtime.restart()
    assert (losses_of(runtime) == first).all()


def test_dropout_is_off_wherever_a_model_has_it() -> None:
    runtime = trained(GPT2)
    assert runtime.notes.facts["dropout"] == {"now": 0.0, "of the model": {"Dropout.p": 0.1}}
    assert runtime.training.model.training
    batch = texts_for(runtime)
    assert runtime.gradient_norm(batch) == runtime.gradient_norm(batch), "nothing is drawn"


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


ROWS, LENGTH, WIDTH, LAYERS, VOCABULARY = 4, 16, 128, 2, 512
TOKENS = ROWS * LENGTH
MLP = 8 * WIDTH**2
"""Operations of one of the two matrix products of GPT-2's MLP, for a token."""
SCORES = 2 * ROWS * LENGTH**2 * WIDTH * LAYERS
"""Operations of all products of queries and keys; those of scores and values are as many."""
FORWARD = TOKENS * (24 * WIDTH**2 * LAYERS + 2 * WIDTH * VOCABULARY) + 2 * SCORES

SHALLOW = {
    "gpt2": {"n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 64},
    "llama": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "vocab_size": 64,
    },
}
"""Shapes of models whose activations take most of the memory."""


@pytest.fixture(params=SHALLOW)
def shallow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference of a preset that is made for these tests."""
    preset = Preset(request.param, "made for these tests", 0, SHALLOW[request.param])
    monkeypatch.setitem(PRESETS, "shallow", preset)
    return "preset:shallow"


def test_a_step_needs_three_forward_passes_and_fused_attention_computes_its_scores_again() -> None:
    runtime = trained(GPT2)
    assert runtime.step_flops(texts_for(runtime)) == StepFlops(3 * FORWARD, 3 * FORWARD + SCORES)


def test_checkpointing_computes_blocks_again_which_the_model_does_not_need() -> None:
    full = trained(GPT2, GradientCheckpointing())
    again = TOKENS * 24 * WIDTH**2 * LAYERS + 2 * SCORES
    unneeded = TOKENS * MLP * LAYERS  # nothing after the last product of a block needs its result
    counted = full.step_flops(texts_for(full))
    assert counted == StepFlops(3 * FORWARD, 3 * FORWARD + SCORES + again - unneeded)
    selective = trained(GPT2, GradientCheckpointing(mode="selective"))
    assert selective.step_flops(texts_for(selective)) == StepFlops(3 * FORWARD, 3 * FORWARD + SCORES)


def test_an_image_s_convolutions_are_counted_forward_and_backward() -> None:
    runtime = trained(RESNET)
    once, twice = (runtime.step_flops(images_for(runtime, images)) for images in (2, 4))
    assert once.model == once.hardware > 0
    assert twice.model == 2 * once.model


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 2), ("adamw", 4)])
def test_the_peak_holds_weights_gradients_and_states_of_the_optimizer(optimizer: str, copies: int) -> None:
    runtime = trained(GPT2, optimizer=optimizer)
    batch = texts_for(runtime, documents=1)
    runtime.step(batch)
    weights = 4 * PRESETS["tiny-gpt2-test"].parameters
    peaks = runtime.peak_memory(lambda: runtime.step(batch))
    assert peaks.reserved_bytes is None
    assert peaks.reasons == {"peak_reserved_bytes": NO_ACCELERATOR}
    # Beside them what the update of the largest weight computes on the way.
    assert copies * weights <= (peaks.allocated_bytes or 0) <= (copies + 0.5) * weights


@pytest.mark.slow
def test_selective_checkpointing_saves_more_than_half_of_what_full_saves(shallow: str) -> None:
    stacks = (), (GradientCheckpointing(),), (GradientCheckpointing(mode="selective"),)
    # after the first step, in which selective checkpointing learns what a block computes
    plain, full, selective = (
        peak_of_texts(trained(shallow, *stack, optimizer="sgd"), 128) for stack in stacks
    )
    assert full < selective < plain
    assert (plain - selective) / (plain - full) > 0.5
