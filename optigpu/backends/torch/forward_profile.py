"""The kernels of a forward pass of any module: timed passes, then the same under torch's profiler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat

import torch

from optigpu.backends.torch.clock import calls_s
from optigpu.backends.torch.device import TorchDevice, kind_of
from optigpu.backends.torch.memory import peaks_of
from optigpu.backends.torch.profile import Recording
from optigpu.hardware.intensity import Kernel
from optigpu.vocabulary import DeviceKind

Inputs = torch.Tensor | Mapping[str, torch.Tensor]
"""What a module is called with: one tensor, or keyword arguments as a tokenizer returns them."""
CASTS: dict[str, torch.dtype] = {"FP16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class PassesProfile:
    """`latencies_s` of passes without the profiler; `kernels` of as many with it; `dtype` of the module's weights.

    `peak_bytes` is what was allocated on the GPU at most, None on a CPU, where torch does not count.
    """

    device: DeviceKind
    dtype: str
    latencies_s: tuple[float, ...]
    kernels: tuple[Kernel, ...]
    weight_bytes: int
    peak_bytes: int | None


def profiled_passes(
    model: torch.nn.Module, inputs: Inputs, precision: str, warmup: int, passes: int
) -> PassesProfile:
    """Profiles a module where its weights are, without gradients and in evaluation mode, which it leaves as it was.

    With FP16 and BF16 a module of float32 weights runs under torch.autocast; every other runs as it is.
    """
    weights = [*model.parameters(), *model.buffers()]
    where = next(iter(weights)).device if weights else torch.device("cpu")
    place = TorchDevice(kind_of(where), seed=0)
    floating = [tensor for tensor in weights if tensor.is_floating_point()]
    dtype = floating[0].dtype if floating else torch.float32
    run = _pass(model, _moved(inputs, where), CASTS.get(precision) if dtype is torch.float32 else None)
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()
            for _ in repeat(None, warmup):
                run()
            return _measured(place, run, passes, dtype, weights)
    finally:
        model.train(was_training)


def _measured(
    place: TorchDevice,
    run: Callable[[], object],
    passes: int,
    dtype: torch.dtype,
    weights: list[torch.Tensor],
) -> PassesProfile:
    latencies: list[float] = []
    peaks = peaks_of(
        lambda: latencies.extend(calls_s(run, 1, place.clock) for _ in range(passes)), place.device
    )
    recording = Recording(place.clock, place.device, steps=0)
    recording.start()
    for _ in range(passes):
        run()
    recording.stop()
    return PassesProfile(
        device=place.device,
        dtype=str(dtype).removeprefix("torch."),
        latencies_s=tuple(latencies),
        kernels=tuple(recording.kernels()),
        weight_bytes=sum({tensor.data_ptr(): tensor.nbytes for tensor in weights}.values()),
        peak_bytes=peaks.allocated_bytes,
    )


def _pass(model: torch.nn.Module, inputs: Inputs, cast: torch.dtype | None) -> Callable[[], object]:
    def run() -> object:
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

    def run_cast() -> object:
        with torch.autocast(_device_of(inputs).type, dtype=cast):
            return run()

    return run if cast is None else run_cast


def _moved(inputs: Inputs, where: torch.device) -> Inputs:
    if isinstance(inputs, Mapping):
        return {name: tensor.to(where) for name, tensor in inputs.items()}
    return inputs.to(where)


def _device_of(inputs: Inputs) -> torch.device:
    return next(iter(inputs.values())).device if isinstance(inputs, Mapping) else inputs.device
