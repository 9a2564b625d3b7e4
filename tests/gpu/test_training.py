"""Training on an NVIDIA GPU: what a CPU learns, timed by events, in less of the allocator's memory."""

from typing import Any

import pytest

from optigpu.hardware import probe
from optigpu.techniques.training.activation_offload import ActivationOffload
from optigpu.techniques.training.chunked_cross_entropy import ChunkedCrossEntropy
from optigpu.techniques.training.compile_training import CompileTraining
from optigpu.techniques.training.fp8_training import Fp8Training
from optigpu.techniques.training.fused_optimizer import FusedOptimizer
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from optigpu.techniques.training.int8_finetune import Int8Finetune
from optigpu.techniques.training.lora import Lora
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.techniques.training.optimizer_8bit import Optimizer8bit
from optigpu.techniques.training.qlora import Qlora
from optigpu.techniques.training.sequence_packing import SequencePacking
from optigpu.vocabulary import DeviceKind
from tests.engine.training import LLAMA, RESNET, losses_of, texts_for, trained

pytestmark = pytest.mark.gpu


def on_cuda(model: str, *stack: Any, **workload: Any) -> Any:
    return trained(model, *stack, device=DeviceKind.CUDA, **workload)


@pytest.mark.parametrize("model", [LLAMA, RESNET])
def test_a_gpu_learns_what_a_cpu_learns(model: str) -> None:
    """Presets are drawn on the device: the weights differ, and so do the losses, by little."""
    there, here = losses_of(on_cuda(model)), losses_of(trained(model))
    assert there == pytest.approx(here, rel=0.1)
    assert there[2] < there[1] < there[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_learns_what_float32_learns(dtype: Any) -> None:
    plain = on_cuda(LLAMA)
    runtime = on_cuda(LLAMA, MixedPrecision(dtype=dtype))
    assert losses_of(runtime) == pytest.approx(losses_of(plain), rel=0.01)
    assert (runtime.training.trainer.loss_scale > 1) == (dtype == "float16")


@pytest.mark.parametrize("stack", [(FusedOptimizer(),), (GradientCheckpointing(mode="selective"),)])
def test_the_same_is_learned_in_another_way(stack: tuple[Any, ...]) -> None:
    plain = on_cuda(LLAMA)
    assert plain.notes.facts["optimizer"]["implementation"] == "foreach"
    runtime = on_cuda(LLAMA, *stack)
    assert losses_of(runtime) == pytest.approx(losses_of(plain), rel=1e-3)


# ---- Rows of few tokens.


TO_HOST = ActivationOffload(smallest_bytes=256)


def in_short_rows(*stack: Any) -> Any:
    return on_cuda(LLAMA, *stack, shortest_tokens=6, sequence_tokens=16)


def first_loss(*stack: Any) -> float:
    return float(losses_of(in_short_rows(*stack), steps=1)[0])


@pytest.mark.parametrize(
    "technique",
    [
        TO_HOST,
        ChunkedCrossEntropy(tokens=8),
        SequencePacking(),
        Optimizer8bit(),
        Optimizer8bit(paged=True),
        CompileTraining(),
    ],
    ids=lambda technique: technique.name,
)
def test_short_rows_teach_the_same_in_another_way(technique: Any) -> None:
    assert losses_of(in_short_rows(technique)) == pytest.approx(losses_of(in_short_rows()), rel=1e-3)


@pytest.mark.parametrize(
    "technique",
    [Lora(), Int8Finetune(), Qlora(), Qlora(base="int4")],
    ids=lambda technique: getattr(technique, "base", technique.name),
)
def test_factors_are_on_the_device_and_learn(technique: Any) -> None:
    runtime = in_short_rows(technique)
    losses = losses_of(runtime)
    assert losses[0] == pytest.approx(first_loss(), rel=0.02)
    assert losses[2] < losses[0]
    assert all(weight.is_cuda for weight in runtime.training.trainer.weights)


def test_products_in_8_bits_learn_nearly_the_same_where_the_gpu_has_them() -> None:
    if Fp8Training().check(probe(), DeviceKind.CUDA, None) is not None:
        with pytest.raises(RuntimeError):
            losses_of(in_short_rows(Fp8Training()))
        return
    assert losses_of(in_short_rows(Fp8Training())) == pytest.approx(losses_of(in_short_rows()), rel=0.01)


def test_activations_in_pinned_memory_leave_the_gpu() -> None:
    peaks = []
    for stack in ((), (TO_HOST,)):
        runtime = in_short_rows(*stack)
        batch = texts_for(runtime, documents=16, length=256, shortest=256)
        runtime.step(batch)
        peaks.append(
            runtime.peak_memory(lambda runtime=runtime, batch=batch: runtime.step(batch)).allocated_bytes
        )
    assert peaks[1] < peaks[0]
