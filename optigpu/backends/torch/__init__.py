"""The torch backend: transformers models on PyTorch."""

from collections.abc import Callable

from optigpu.backends.torch.runtime import ModelRuntime, TorchRuntime
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind

__all__ = ["ModelRuntime", "TorchRuntime", "prepare"]


def prepare(
    model: str | None,
    stack: tuple[Technique, ...],
    device: DeviceKind,
    seed: int,
    progress: Callable[[str], None],
) -> TorchRuntime | ModelRuntime:
    """The runtime for a workload: a model with the resolved stack applied, or the bare device.

    `progress` is told what it is busy with.

    Raises UnsupportedError when this machine or this model cannot do it.
    """
    if model is None:
        return TorchRuntime(device, seed)
    return ModelRuntime(model, stack, device, seed, progress)
