"""The figures that a step of training is described by: operations, bytes, weights."""

import math
from pathlib import Path

import pytest

from optigpu.backends.torch.memory import NO_ACCELERATOR
from optigpu.backends.training import StepFlops
from optigpu.models.presets import PRESETS, Preset
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from optigpu.techniques.training.gradient_checkpointing.recomputing import chosen_again
from tests.engine.training import GPT2, LLAMA, RESNET, batch_for, images_for, texts_for, trained

pytestmark = pytest.mark.usefixtures("one_torch_thread")
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


def test_counting_changes_no_weight() -> None:
    runtime = trained(LLAMA)
    batch = texts_for(runtime)
    norm = runtime.gradient_norm(batch)
    runtime.step_flops(batch)
    assert runtime.gradient_norm(batch) == norm


def test_weights_are_counted_before_the_stack_and_as_they_are_trained() -> None:
    facts = trained(GPT2).weights()
    assert facts.parameters == facts.trainable == PRESETS["tiny-gpt2-test"].parameters
    assert facts.bytes == pytest.approx(4 * PRESETS["tiny-gpt2-test"].parameters, rel=0.01)


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


def peak_of(model: str, *stack: GradientCheckpointing, documents: int = 8) -> int:
    """Of a step after the first one, in which selective checkpointing learns what a block computes."""
    runtime = trained(model, *stack, optimizer="sgd")
    batch = texts_for(runtime, documents, length=128, shortest=128)
    runtime.step(batch)
    found = runtime.peak_memory(lambda: runtime.step(batch)).allocated_bytes
    assert found is not None
    return found


@pytest.mark.slow
def test_selective_checkpointing_saves_more_than_half_of_what_full_saves(shallow: str) -> None:
    plain, full = peak_of(shallow), peak_of(shallow, GradientCheckpointing())
    selective = peak_of(shallow, GradientCheckpointing(mode="selective"))
    assert full < selective < plain
    assert (plain - selective) / (plain - full) > 0.5


@pytest.mark.slow
def test_each_further_sample_takes_as_much_memory(shallow: str) -> None:
    four, eight, sixteen = (peak_of(shallow, documents=documents) for documents in (4, 8, 16))
    assert sixteen - eight == pytest.approx(2 * (eight - four), rel=0.01)


def test_of_a_block_s_products_the_last_and_the_smallest_are_not_kept() -> None:
    attention = math.inf
    gpt2 = [3.0, attention, 1.0, 4.0, 4.0]
    assert chosen_again(gpt2) == {4}, "an eighth is more than a ninth of the operations"
    llama = [1.0, 1.0, 1.0, attention, 1.0, 8 / 3, 8 / 3, 8 / 3]
    assert chosen_again(llama) == {0, 7}
    shared_keys = [1.0, 0.25, 0.25, attention, 1.0, 4.0, 4.0, 4.0]
    assert chosen_again(shared_keys) == {1, 2, 7}


@pytest.mark.parametrize("model", [GPT2, LLAMA])
def test_selective_checkpointing_computes_few_products_again(model: str) -> None:
    runtime = trained(model, GradientCheckpointing(mode="selective"))
    batch = texts_for(runtime)
    first = runtime.step_flops(batch)
    counted = runtime.step_flops(batch)
    assert counted.model == first.model
    assert first.hardware <= counted.hardware < 1.05 * first.hardware
    assert (counted.hardware > first.hardware) == (model == LLAMA)


def test_a_profile_holds_the_whole_step(tmp_path: Path) -> None:
    runtime = trained(GPT2)
    batch = texts_for(runtime)
    seen = runtime.profile(lambda: runtime.step(batch), 8, tmp_path / "trace.json.gz")
    assert seen.steps == 0
    names = {kernel.name for kernel in seen.kernels}
    assert {"aten::tanh", "aten::tanh_backward", "aten::addcdiv_"} <= names


def test_the_peak_is_of_the_step_and_no_weight_is_lost() -> None:
    runtime = trained(RESNET)
    losses = []
    batch = batch_for(runtime)
    runtime.peak_memory(lambda: losses.append(runtime.step(batch).loss))
    assert len(losses) == 1
