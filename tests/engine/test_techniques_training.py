"""The techniques of training: each does what it says, and learns what a plain step learns."""

from typing import Any

import pytest
import torch

from optigpu.hardware import probe
from optigpu.job.spec import JobSpec, resolve
from optigpu.techniques.base import Technique
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.kernels.fused_attention import FusedAttention
from optigpu.techniques.training.compile_training import CompileTraining
from optigpu.techniques.training.fused_optimizer import FusedOptimizer
from optigpu.techniques.training.gradient_accumulation import GradientAccumulation
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.techniques.training.optimizer_in_backward import OptimizerInBackward
from optigpu.vocabulary import DeviceKind, SpecError
from tests.engine.tiny_models import assert_needs_hook
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
    before, batch = weights_of(runtime), texts_for(runtime)
    assert runtime.gradient_norm(batch) > 0.5
    runtime.step(batch)
    trainer = runtime.training.trainer
    moved = torch.nn.utils.get_total_norm(
        [now.detach() - old for now, old in zip(trainer.weights, before, strict=True)]
    )
    assert float(moved) == pytest.approx(0.5, rel=0.01)
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
@pytest.mark.parametrize("model", [LLAMA, GPT2, VIT])
@pytest.mark.parametrize("mode", ["full", "selective"])
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


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ((OptimizerInBackward(), GradientAccumulation()), "added up before a weight changes"),
        ((OptimizerInBackward(), MixedPrecision(dtype="float16")), "whole gradient"),
        ((GradientCheckpointing(mode="selective"), CompileTraining()), "operators run one by one"),
    ],
)
def test_what_cannot_go_together_is_refused(stack: tuple[Technique, ...], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        resolve(stack, "train_step")


def test_full_checkpointing_goes_with_a_compiled_step() -> None:
    assert len(resolve((GradientCheckpointing(), CompileTraining()), "train_step")) == 2


@pytest.mark.slow
def test_everything_that_goes_together_learns_what_a_plain_step_learns() -> None:
    plain = losses_of(trained(LLAMA))
    whole = (MixedPrecision(), GradientCheckpointing(mode="selective"), FusedOptimizer())
    assert losses_of(trained(LLAMA, *whole, OptimizerInBackward())) == pytest.approx(plain, rel=0.01)
    assert losses_of(trained(LLAMA, *whole, GradientAccumulation())) == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize(
    ("technique", "kernels"),
    [(EagerAttention(), set()), (FusedAttention(kernel="flash"), {"flash"})],
)
def test_attention_runs_forward_and_backward_as_the_stack_asks(
    technique: Technique, kernels: set[str]
) -> None:
    runtime = trained(LLAMA, technique)
    runtime.observe(texts_for(runtime))
    ran = {name for name in runtime.notes.facts["attention_kernels"] if "flash_attention" in name}
    assert bool(ran) == bool(kernels)
    assert any(name.endswith("backward") for name in ran) == bool(kernels)
    assert not any("log_softmax" in name for name in runtime.notes.facts["attention_kernels"])
    assert losses_of(runtime) == pytest.approx(losses_of(trained(LLAMA)), rel=1e-4)


def test_images_have_no_attention_to_record_in_a_network_of_convolutions() -> None:
    runtime = trained(RESNET)
    runtime.observe(images_for(runtime))
    assert runtime.notes.facts["attention_kernels"] == []
    assert "attn_implementation" not in runtime.notes.facts
