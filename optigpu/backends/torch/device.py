"""A torch device, how torch reaches each kind, and clocks outside of what is measured: the host's, or a GPU's events.

python -m optigpu.backends.torch.device KIND: what torch tells of its GPUs of a kind, as a JSON list on stdout. Its
entries have the properties that optigpu.hardware.gpu reads; it is empty where torch cannot use such a GPU.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from optigpu.hardware.device_kinds import KINDS, torch_name
from optigpu.techniques.base import Notes
from optigpu.vocabulary import DeviceKind, OptiGPUError, SpecError, UnsupportedError


class Clock(Protocol):
    """Marks moments on the device's own time line; reads them after the work is done."""

    def mark(self) -> Any:
        """A moment, cheap to take: nanoseconds on a CPU, a recorded event on a GPU."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between successive marks; waits for the device. Shape: len(marks) - 1."""


class CpuClock:
    """perf_counter_ns: operators on a CPU are done when they return."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def seconds(self, marks: Sequence[int]) -> list[float]:
        return [(later - earlier) / 1e9 for earlier, later in pairwise(marks)]


class EventClock:
    """Events of a GPU, of torch.cuda, torch.xpu or torch.mps: it notes the moment when it gets there."""

    def __init__(self, device: DeviceKind) -> None:
        self._device = torch.get_device_module(torch_name(device))

    def mark(self) -> Any:
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """After the one synchronization of a request, which waits for all streams."""
        self._device.synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]


def clock_for(device: DeviceKind) -> Clock:
    return CpuClock() if device is DeviceKind.CPU else EventClock(device)


def calls_s(call: Callable[[], object], count: int, clock: Clock) -> float:
    begin = clock.mark()
    for _ in range(count):
        call()
    return clock.seconds([begin, clock.mark()])[0]


class TorchDevice:
    """A device, the clock that times it (a profiler may take its place), the seed of its numbers, and what is noted."""

    def __init__(self, device: DeviceKind, seed: int) -> None:
        require(device)
        self.device = device
        self.name = torch_name(device)
        self.seed = seed
        self.clock = clock_for(device)
        self.notes = Notes({"threads": torch.get_num_threads()})
        self._moved: tuple[NDArray[Any], torch.Tensor] | None = None

    def tensor(self, array: NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The array on the device; the last one is remembered, so that a repeated request copies nothing."""
        if self._moved is None or self._moved[0] is not array:
            made = torch.from_numpy(np.ascontiguousarray(array)).to(self.name, dtype)
            self._moved = (array, made)
        return self._moved[1]


def module_of(device: DeviceKind) -> Any:
    return torch.get_device_module(torch_name(device))


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a torch device, whose "cuda" may be an AMD GPU. Raises SpecError for one that no variant runs on."""
    if device.type == "cuda" and torch.version.hip:
        return DeviceKind.ROCM
    if device.type not in set(DeviceKind):
        raise SpecError(f"There is no device {device.type!r}; the devices are {', '.join(DeviceKind)}.")
    return DeviceKind(device.type)


def is_there(device: DeviceKind) -> bool:
    if device is DeviceKind.CPU:
        return True
    return bool(module_of(device).is_available()) and kind_of(torch.device(torch_name(device))) is device


def require(device: DeviceKind) -> None:
    """Raises UnsupportedError when torch finds no such device."""
    if is_there(device):
        return
    built = KINDS[device].built
    version = getattr(torch.version, built.removeprefix("torch_"), None) if built else None
    raise UnsupportedError(
        f"torch {torch.__version__} (built for {version or f'no {device.upper()}'}) finds no {device.upper()} device; "
        f"install a {device.upper()} build of torch and its driver, or ask for device cpu."
    )


SIDE, LARGEST = 64, 7
"""Products of whole numbers this small are exact in every precision that a GPU multiplies in."""


def multiply(device: DeviceKind) -> None:
    """What a device must get right before it is given jobs. Raises as torch does, and OptiGPUError for a wrong
    product."""
    products = []
    for place in (torch_name(device), "cpu"):
        every = torch.arange(SIDE * SIDE, device=place, dtype=torch.float32)
        numbers = every.remainder(LARGEST + 1).reshape(SIDE, SIDE)
        products.append((numbers @ numbers).cpu())
    if not torch.equal(*products):
        raise OptiGPUError("the product of two matrices of small whole numbers is wrong")


PROPERTIES = ("name", "total_memory", "gcnArchName", "uuid", "driver_version")


def told(device: DeviceKind) -> list[dict[str, Any]]:
    """torch.mps has no properties: its entry is empty."""
    if not is_there(device):
        return []
    if device is DeviceKind.MPS:
        return [{}]
    module = module_of(device)
    return [described(module.get_device_properties(number)) for number in range(module.device_count())]


def described(properties: object) -> dict[str, Any]:
    """Those of a GPU that it has, as JSON. A UUID may be bytes (torch.xpu) or an object of its own."""
    found = {name: getattr(properties, name, None) for name in PROPERTIES}
    return {
        name: value.hex() if isinstance(value, bytes) else value if isinstance(value, int) else str(value)
        for name, value in found.items()
        if value is not None
    }


if __name__ == "__main__":
    print(json.dumps(told(DeviceKind(sys.argv[1]))))
