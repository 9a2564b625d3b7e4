"""The figures that a step of training is described by: operations, bytes, weights."""

from pathlib import Path

import pytest

from optigpu.backends.torch.memory import NO_ACCELERATOR
from optigpu.backends.training import StepFlops
from optigpu.models.presets import PRESETS, Preset
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from tests.engine.training import GPT2, LLAMA, RESNET, batch_for, images_for, texts_for, trained

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ROWS, LENGTH, WIDTH, LAYERS, VOCABULARY = 4, 16, 128, 2, 512
TOKENS = ROWS * LENGTH
MLP = 8 * WIDTH**2
"""Operations of one of the two matrix products of GPT-2's MLP, for a token."""
SCORES = 2 * ROWS * LENGTH**2 * WIDTH * LAYERS
"""Operations of all products of queries and keys; those of scores and values are as many."""
FORWARD = TOKENS * (24 * WIDTH**2 * LAYERS + 2 * WIDTH * VOCABULARY) + 2 * SCORES

SHALLOW = Preset(
    "gpt2",
    "made for these tests: its activations take most of the memory",
    0,
    {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 64},
)


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


def peak_of(*stack: GradientCheckpointing, documents: int = 8) -> int:
    """Of a step of `preset:shallow`."""
    runtime = trained("preset:shallow", *stack, optimizer="sgd")
    batch = texts_for(runtime, documents, length=128, shortest=128)
    found = runtime.peak_memory(lambda: runtime.step(batch)).allocated_bytes
    assert found is not None
    return found


@pytest.mark.slow
def test_selective_checkpointing_saves_more_than_half_of_what_full_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PRESETS, "shallow", SHALLOW)
    plain, full = peak_of(), peak_of(GradientCheckpointing())
    selective = peak_of(GradientCheckpointing(mode="selective"))
    assert full < selective < plain
    assert (plain - selective) / (plain - full) > 0.5


@pytest.mark.slow
def test_each_further_sample_takes_as_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "shallow", SHALLOW)
    four, eight, sixteen = (peak_of(documents=documents) for documents in (4, 8, 16))
    assert sixteen - eight == pytest.approx(2 * (eight - four), rel=0.01)


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
