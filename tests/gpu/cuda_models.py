"""Models on an NVIDIA GPU, and what is called there."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from optigpu.backends.torch.applied import DecodingModel
from optigpu.job.spec import resolve
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from tests.engine.tiny_models import ignore


def on_cuda(model: str, *stack: Technique) -> DecodingModel:
    """The model with the stack applied."""
    return DecodingModel(model, resolve(stack, "generate"), DeviceKind.CUDA, seed=0, progress=ignore)


def calls_of(run: Callable[[], Any]) -> Counter[str]:
    """How often each call of the CUDA runtime was made, and each operator and kernel was run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    return Counter({event.key: event.count for event in profiler.key_averages()})
