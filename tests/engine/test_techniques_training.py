"""The techniques of training: each does what it says and learns what a plain step learns, alone and in stacks."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from optigpu.backends.training import NO_TARGET, Texts
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.models.families import FAMILIES
from optigpu.surgery.training_steps import PackedArrangement, first_fit_decreasing
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.training.activation_offload import ActivationOffload
from optigpu.techniques.training.chunked_cross_entropy import ChunkedCrossEntropy
from optigpu.techniques.training.fp8_training import Fp8Training
from optigpu.techniques.training.fused_optimizer import FusedOptimizer
from optigpu.techniques.training.gradient_accumulation import GradientAccumulation
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from optigpu.techniques.training.int8_finetune import Int8Finetune
from optigpu.techniques.training.lora import Lora
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.techniques.training.optimizer_8bit import Optimizer8bit
from optigpu.techniques.training.optimizer_in_backward import OptimizerInBackward
from optigpu.techniques.training.qlora import Qlora
from optigpu.techniques.training.sequence_packing import SequencePacking
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from optigpu.workloads.train_step import TrainStep
from tests.breadth import spread
from tests.engine.decoder_models import configured
from tests.engine.tiny_models import assert_needs_hook
from tests.engine.training import (
    GPT2,
    LLAMA,
    RESNET,
    VIT,
    batch_for,
    losses_of,
    moved,
    texts_for,
    trained,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def dtypes_of_products(runtime: Any) -> set[torch.dtype]:
    """The dtypes in which linear layers and convolutions of a step compute."""
    seen = set()
    model = runtime.training.model
    handles = [
        module.register_forward_hook(lambda *given: seen.add(given[2].dtype))
        for module in model.modules()
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d))
    ]
    runtime.step(batch_for(runtime))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("model", [LLAMA, RESNET])
def test_mixed_precision_multiplies_in_bfloat16_and_updates_in_float32(model: str) -> None:
    plain = losses_of(trained(model))

    def claim() -> None:
        runtime = trained(model, MixedPrecision())
        assert dtypes_of_products(runtime) == {torch.bfloat16}
        assert {weight.dtype for weight in runtime.training.trainer.weights} == {torch.float32}
        runtime.restart()
        losses = losses_of(runtime)
        assert losses == pytest.approx(plain, rel=0.01)
        assert not (losses == plain).any()
        assert runtime.notes.facts["autocast"] == "bfloat16"

    assert_needs_hook(MixedPrecision(), "training", claim)


def test_mixed_precision_in_float16_scales_losses_and_clips_gradients() -> None:
    technique = MixedPrecision(dtype="float16", clip_norm=0.5)
    runtime = trained(LLAMA, technique, optimizer="sgd", learning_rate=1.0)
    batch, trainer = texts_for(runtime), runtime.training.trainer
    assert runtime.gradient_norm(batch) > 0.5
    assert moved(trainer, batch) == pytest.approx(0.5, rel=0.01)
    assert trainer.loss_scale > 1
    reason = technique.check(probe(), DeviceKind.CPU, None)
    assert reason is not None
    assert "set dtype to bfloat16" in reason
    assert technique.check(probe(), DeviceKind.CUDA, None) is None


def rows_of_passes(runtime: Any) -> list[int]:
    """How many samples go through the model together, pass by pass, in a step."""
    rows: list[int] = []
    handle = runtime.training.model.register_forward_pre_hook(
        lambda _, __, named: rows.append(len(next(iter(named.values())))), with_kwargs=True
    )
    runtime.step(batch_for(runtime))
    handle.remove()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("model", [LLAMA, VIT])
def test_gradient_accumulation_learns_the_same_from_parts_of_a_batch(model: str) -> None:
    plain = losses_of(trained(model, learning_rate=1e-3))

    def claim() -> None:
        runtime = trained(model, GradientAccumulation(micro_batches=4), learning_rate=1e-3)
        assert rows_of_passes(runtime) == [1, 1, 1, 1]
        runtime.restart()
        assert losses_of(runtime) == pytest.approx(plain, rel=1e-4)

    assert_needs_hook(GradientAccumulation(), "training", claim)


def test_documents_of_different_lengths_weigh_in_parts_as_they_do_together() -> None:
    plain, parts = trained(LLAMA), trained(LLAMA, GradientAccumulation())
    texts = texts_for(plain, documents=4, length=32, shortest=2)
    assert parts.gradient_norm(texts) == pytest.approx(plain.gradient_norm(texts), rel=1e-4)


def test_a_batch_that_cannot_be_split_evenly_is_refused() -> None:
    workload = {"kind": "train_step", "batch_size": 3}
    with pytest.raises(SpecError, match="make batch_size a multiple of micro_batches"):
        JobSpec(workload=workload, model=LLAMA, stack=[{"name": "gradient_accumulation"}])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mode"), spread([LLAMA, GPT2, VIT], ["full", "selective"], by_default=3))
def test_gradient_checkpointing_learns_the_same_from_activations_that_it_computes_again(
    model: str, mode: Any
) -> None:
    plain = trained(model)
    losses = losses_of(plain)

    def claim() -> None:
        runtime = trained(model, GradientCheckpointing(mode=mode))
        assert (losses_of(runtime) == losses).all()
        assert runtime.notes.facts.get("gradient_checkpointing") == {"mode": mode, "blocks": 2}
        counted = runtime.step_flops(batch_for(runtime))
        again = counted.hardware / plain.step_flops(batch_for(plain)).hardware - 1
        assert again > 0.1 if mode == "full" else again < 0.03

    assert_needs_hook(GradientCheckpointing(), "training", claim)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_fused_optimizer_updates_as_the_other(optimizer: str) -> None:
    rule: dict[str, Any] = {"optimizer": optimizer, "learning_rate": 1e-2}
    plain = trained(LLAMA, **rule)
    assert plain.notes.facts["optimizer"]["implementation"] == "for-loop"
    losses = losses_of(plain)

    def claim() -> None:
        runtime = trained(LLAMA, FusedOptimizer(), **rule)
        assert losses_of(runtime) == pytest.approx(losses, rel=1e-3)
        expected = {"name": optimizer, "learning_rate": 1e-2, "implementation": "fused"}
        assert runtime.notes.facts["optimizer"] == expected

    assert_needs_hook(FusedOptimizer(), "training", claim)


def most_gradients(runtime: Any) -> int:
    """How many weights have a gradient at once, at the most, in a step."""
    counts, weights = [], runtime.training.trainer.weights

    def count(_weight: torch.Tensor) -> None:
        counts.append(sum(weight.grad is not None for weight in weights))

    handles = [weight.register_post_accumulate_grad_hook(count) for weight in weights]
    runtime.step(batch_for(runtime))
    for handle in handles:
        handle.remove()
    return max(counts)


@pytest.mark.parametrize("model", [GPT2, RESNET])
def test_the_optimizer_in_the_backward_pass_frees_each_gradient_at_once(model: str) -> None:
    """GPT-2's head is its embedding: that weight waits for both of its gradients."""
    plain = trained(model, learning_rate=1e-2)
    losses = losses_of(plain)
    assert most_gradients(plain) == len(plain.training.trainer.weights)

    def claim() -> None:
        runtime = trained(model, OptimizerInBackward(), learning_rate=1e-2)
        assert (losses_of(runtime) == losses).all()
        assert most_gradients(runtime) == 0
        runtime.restart()
        assert (losses_of(runtime) == losses).all()

    assert_needs_hook(OptimizerInBackward(), "training", claim)


def test_a_norm_can_be_read_although_updates_happen_in_the_backward_pass() -> None:
    runtime = trained(LLAMA, OptimizerInBackward())
    before, batch = weights_of(runtime), texts_for(runtime)
    assert runtime.gradient_norm(batch) == pytest.approx(trained(LLAMA).gradient_norm(batch))
    assert all(map(torch.equal, before, weights_of(runtime)))


# ---- Stacks.


ALWAYS: tuple[Technique, ...] = (
    MixedPrecision(),
    GradientCheckpointing(mode="selective"),
    ChunkedCrossEntropy(tokens=8),
    ActivationOffload(target="disk", smallest_bytes=256),
    SequencePacking(),
)
EIGHT_BITS = Optimizer8bit(smallest=256)
STACKS: list[tuple[Technique, ...]] = [
    (Fp8Training(), GradientAccumulation(), EIGHT_BITS),
    (Fp8Training(), Lora(), OptimizerInBackward(), EIGHT_BITS),
    (Fp8Training(), Lora(), GradientAccumulation(), FusedOptimizer()),
    (Int8Finetune(), OptimizerInBackward(), EIGHT_BITS),
    (Int8Finetune(), GradientAccumulation(), FusedOptimizer()),
    (Qlora(), OptimizerInBackward(), FusedOptimizer()),
    (Qlora(base="int4"), GradientAccumulation(), EIGHT_BITS),
]


@pytest.mark.long
@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: " + ".join(each.name for each in stack))
def test_a_stack_learns_and_begins_again(stack: tuple[Technique, ...]) -> None:
    plain = losses_of(trained(LLAMA), steps=1)[0]
    runtime = trained(LLAMA, *ALWAYS, *stack, shortest_tokens=6, sequence_tokens=16)
    losses = losses_of(runtime)
    assert losses[0] == pytest.approx(plain, rel=0.01)
    assert losses[2] < losses[0]
    runtime.restart()
    assert losses_of(runtime).tolist() == losses.tolist()


# ---- sequence_packing: every loss is the one of the document in a row of its own.


LANGUAGE_FAMILIES = [name for name, family in FAMILIES.items() if family.decoder]
LENGTHS = (5, 9, 3, 12, 2, 7)
ROW = 16


def texts() -> Texts:
    source = np.random.default_rng(0)
    return Texts(tuple(source.integers(96, size=length) for length in LENGTHS), ROW)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_first_fit_decreasing_places_each_document_once_and_fills_no_row_over(lengths: list[int]) -> None:
    rows = first_fit_decreasing(lengths, 20)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    used = [sum(lengths[document] for document in row) for row in rows]
    assert max(used) <= 20
    # At most one row is half empty: the first document of a later one would have fitted into it.
    assert sum(space <= 10 for space in used) <= 1


@pytest.mark.parametrize(("family", "attention"), spread(LANGUAGE_FAMILIES, ["sdpa", "eager"], by_default=4))
def test_the_losses_of_each_document_are_those_of_its_own_row(family: str, attention: str) -> None:
    model, batch = configured(family), texts()
    model.set_attn_implementation(attention)
    (packed,) = PackedArrangement(model, Notes())(batch)
    with torch.no_grad():
        logits = model(**packed.inputs, use_cache=False).logits
        losses = functional.cross_entropy(
            logits.flatten(0, 1), packed.labels.flatten(), ignore_index=NO_TARGET, reduction="none"
        ).view(3, ROW)
        places = {3: (0, 0), 2: (0, 12), 1: (1, 0), 5: (1, 9), 0: (2, 0), 4: (2, 5)}
        for document, (row, begin) in places.items():
            ids = torch.from_numpy(batch.documents[document])
            alone = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
            expected = functional.cross_entropy(alone, ids[1:], reduction="none")
            found = losses[row, begin : begin + len(ids) - 1]
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert packed.targets == sum(LENGTHS) - len(LENGTHS) == int((losses != 0).sum())


@pytest.mark.parametrize("model", [LLAMA, GPT2])
def test_a_step_learns_the_same_from_fewer_rows(model: str) -> None:
    plain = trained(model)
    expected, norm = plain.step(texts()), plain.gradient_norm(texts())

    def claim() -> None:
        runtime = trained(model, SequencePacking(), shortest_tokens=2, sequence_tokens=ROW)
        done = runtime.step(texts())
        assert done.computed_tokens == 3 * ROW < expected.computed_tokens
        assert done.loss == pytest.approx(expected.loss, rel=1e-5)
        assert runtime.gradient_norm(texts()) == pytest.approx(norm, rel=1e-4)
        for found, wanted in zip(weights_of(runtime), weights_of(plain), strict=True):
            assert torch.allclose(found, wanted, atol=1e-5)
        assert runtime.notes.facts["packed_rows"] == 3

    assert_needs_hook(SequencePacking(), "training", claim)


def test_each_part_of_a_step_is_packed_where_gradients_are_accumulated() -> None:
    stack = SequencePacking(), GradientAccumulation(micro_batches=2)
    runtime = trained(LLAMA, *stack, shortest_tokens=2, sequence_tokens=ROW)
    done = runtime.step(texts())
    assert done.computed_tokens == 4 * ROW
    assert done.loss == pytest.approx(trained(LLAMA).step(texts()).loss, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
        ("rwkv", {"hidden_size": 64, "num_hidden_layers": 2}),
    ],
)
def test_a_model_whose_attention_cannot_be_masked_so_is_refused(family: str, sizes: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match="cannot keep the attention of this model within a document"):
        PackedArrangement(configured(family, **sizes), Notes())


def test_a_model_with_a_window_below_a_row_is_refused() -> None:
    arrange = PackedArrangement(configured("mistral", sliding_window=12), Notes())
    with pytest.raises(UnsupportedError, match="attends to 12 tokens at most"):
        arrange(texts())


@pytest.mark.parametrize(("shortest", "fits"), [(None, False), (ROW, False), (ROW - 1, True)])
def test_documents_that_all_fill_a_row_are_refused_when_a_job_is_posted(
    shortest: int | None, fits: bool
) -> None:
    workload = TrainStep(sequence_tokens=ROW, shortest_tokens=shortest)
    problem = SequencePacking().fits(workload)
    assert (problem is None) is fits
    assert fits or "set shortest_tokens below 16" in str(problem)
