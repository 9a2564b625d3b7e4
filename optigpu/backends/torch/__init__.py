"""The torch backend: transformers models on PyTorch."""

from collections.abc import Callable

from optigpu.backends.torch.passes import PassRuntime
from optigpu.backends.torch.runtime import ModelRuntime, TorchRuntime
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Task

__all__ = ["ModelRuntime", "PassRuntime", "TorchRuntime", "prepare"]


def prepare(
    model: str | None,
    stack: tuple[Technique, ...],
    device: DeviceKind,
    seed: int,
    progress: Callable[[str], None],
    task: Task = Task.DECODING,
) -> TorchRuntime | ModelRuntime | PassRuntime:
    """The runtime for a workload: a model, loaded for `task`, with the resolved stack applied; or the bare device.

    `progress` is told what it is busy with.

    Raises UnsupportedError when this machine or this model cannot do it.
    """
    if model is None:
        return TorchRuntime(device, seed)
    if task is Task.DECODING:
        return ModelRuntime(model, stack, device, seed, progress)
    return PassRuntime(task, model, stack, device, seed, progress)
