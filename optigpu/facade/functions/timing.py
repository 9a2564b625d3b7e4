"""Times calls of a caller's own code in this process: the device's clock, and the statistics of every other figure. One
process stands for itself alone: a job measures several (`optigpu.run`)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from optigpu.backends.torch.clock import calls_s, clock_for
from optigpu.backends.torch.device import is_there, kind_of
from optigpu.backends.torch.memory import operator_peaks_of, peaks_of
from optigpu.documents.result import Measurement, MetricSummary
from optigpu.facade.benchmark_result import MEBIBYTE
from optigpu.facade.in_process import device_of, interval_ms
from optigpu.models.loading.load import load_image_model
from optigpu.models.reference import parse_reference
from optigpu.statistics.estimates import Bounds
from optigpu.statistics.intervals import ratio, summarise
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError


@dataclass(frozen=True)
class CallTimes:
    """Seconds of equal calls, one after the other."""

    samples_s: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return 1e3 * float(self._summary.value or 0.0)

    @property
    def ci_ms(self) -> Bounds | None:
        """The median's 95% interval; None for fewer calls than one needs."""
        return interval_ms(self._summary)

    @property
    def _summary(self) -> MetricSummary:
        return summarise(Measurement(name="latency_s", samples=(self.samples_s,)))


def device_for(asked: str | torch.device | None) -> torch.device:
    """The device that was asked for; None takes CUDA where there is an NVIDIA GPU, and else this CPU. Raises
    UnsupportedError for CUDA where there is none, and SpecError for a device that is neither."""
    if asked is None:
        return torch.device("cuda" if is_there(DeviceKind.CUDA) else "cpu")
    kind = device_of(str(asked))
    if kind not in (DeviceKind.CPU, DeviceKind.CUDA):
        raise SpecError(
            f"These functions run on cpu and cuda; measure {kind} by a job: optigpu run --device {kind}."
        )
    if not is_there(kind):
        raise UnsupportedError(
            "There is no CUDA device here; leave device out, or name cpu, to use this CPU."
        )
    return torch.device(asked)


def place_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"


def timed(call: Callable[[], object], device: torch.device, *, warmup: int, repeats: int) -> CallTimes:
    return timed_in_turns({"": call}, device, warmup=warmup, repeats=repeats)[""]


def timed_in_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, *, warmup: int, repeats: int
) -> dict[str, CallTimes]:
    """The times of each of the calls, which take turns: what slows the machine slows them all alike."""
    clock = clock_for(kind_of(device))
    for call in calls.values():
        calls_s(call, warmup, clock)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(calls_s(call, 1, clock))
    return {name: CallTimes(tuple(found)) for name, found in samples.items()}


def speedup(slower: CallTimes, faster: CallTimes) -> tuple[float, Bounds | None]:
    """How many times faster the second calls are, with the 95% interval within this process."""
    return ratio((slower.samples_s,), (faster.samples_s,))


def peak_mb(call: Callable[[], object], held: Iterable[torch.Tensor], device: torch.device) -> float:
    """The peak memory of one call in MB: of CUDA's allocator, or of the tensors on a CPU, `held` ones included."""
    kind = kind_of(device)
    found = peaks_of(call, kind) if kind is DeviceKind.CUDA else operator_peaks_of(call, held)
    return (found.allocated_bytes or 0) / MEBIBYTE


def require_divisible(d_model: int, n_heads: int) -> None:
    """Raises SpecError if the heads do not divide the width."""
    if n_heads < 1 or d_model % n_heads:
        raise SpecError(
            f"n_heads: {n_heads} heads do not divide a width of {d_model}; choose a divisor of it."
        )


ModelFn = Callable[[], torch.nn.Module]
"""Makes a model, as torchvision's `models.resnet50` does."""


def resnet_50() -> torch.nn.Module:
    """preset:resnet-50 with random weights, on the CPU in float32, ready to be trained."""
    reference = parse_reference("preset:resnet-50")
    model: torch.nn.Module = load_image_model(reference, device="cpu", dtype="float32")
    return model.requires_grad_(True)
