"""Steps of training on an NVIDIA GPU: what a CPU learns, timed by events, in the allocator's bytes."""

from typing import Any

import pytest

from optigpu.techniques.training.fused_optimizer import FusedOptimizer
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.vocabulary import DeviceKind
from tests.engine.training import LLAMA, RESNET, batch_for, losses_of, trained

pytestmark = pytest.mark.gpu


def on_cuda(model: str, *stack: Any, **workload: Any) -> Any:
    return trained(model, *stack, device=DeviceKind.CUDA, **workload)


@pytest.mark.parametrize("model", [LLAMA, RESNET])
def test_a_gpu_learns_what_a_cpu_learns(model: str) -> None:
    """Presets are drawn on the device: the weights differ, and so do the losses, by little."""
    there, here = losses_of(on_cuda(model)), losses_of(trained(model))
    assert there == pytest.approx(here, rel=0.1)
    assert there[2] < there[1] < there[0]


@pytest.mark.parametrize("model", [LLAMA, RESNET])
def test_parts_are_timed_by_events_and_bytes_are_the_allocator_s(model: str) -> None:
    runtime = on_cuda(model)
    batch = batch_for(runtime)
    step = runtime.step(batch)
    assert min(step.data_s, step.forward_s, step.backward_s, step.optimizer_s) > 0
    peaks = runtime.peak_memory(lambda: runtime.step(batch))
    held = 4 * (runtime.weights().bytes or 0)
    assert held <= (peaks.allocated_bytes or 0) <= (peaks.reserved_bytes or 0)


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
