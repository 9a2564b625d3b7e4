"""A torch device, how torch reaches each kind, its free memory and the peaks during a run.

And clocks outside of what is measured: the host's, or a GPU's events.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from optigpu.backends.runtime import MemoryPeaks
from optigpu.hardware.cgroup import free_host_bytes
from optigpu.hardware.device_kinds import KINDS, Ability, torch_name
from optigpu.models.loading.storages import storages
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


NO_ACCELERATOR = KINDS[DeviceKind.CPU].lacks[Ability.MEMORY_PEAKS]


def free_bytes(device: DeviceKind) -> int:
    """Of the GPU (an Apple GPU's is what Metal advises to hold), or of the host within the process's own limit."""
    if device is DeviceKind.CPU:
        return free_host_bytes()
    if device is DeviceKind.MPS:
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return int(module_of(device).mem_get_info()[0])


def held_bytes(device: DeviceKind) -> tuple[int, int] | None:
    """What a GPU's allocator has given out and reserved now; None on a CPU."""
    if device is DeviceKind.CPU:
        return None
    if device is DeviceKind.MPS:
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    module = module_of(device)
    return module.memory_allocated(), module.memory_reserved()


def peaks_of(run: Callable[[], object], device: DeviceKind) -> MemoryPeaks:
    """The peaks of a GPU's allocator during `run`, allocated and reserved; or the reason why there are none."""
    reason = KINDS[device].lacks.get(Ability.MEMORY_PEAKS)
    if reason:
        run()
        return MemoryPeaks(reasons={"peak_bytes": reason, "peak_reserved_bytes": reason})
    module = module_of(device)
    module.reset_peak_memory_stats()
    run()
    return MemoryPeaks(module.max_memory_allocated(), module.max_memory_reserved())


def last_gpu_cache_bytes(device: DeviceKind) -> int:
    if device is DeviceKind.MPS:
        return 0
    properties = module_of(device).get_device_properties(0)
    name = "last_level_cache_size" if device is DeviceKind.XPU else "L2_cache_size"
    return int(getattr(properties, name))


def operator_peaks_of(call: Callable[[], object], held: Iterable[torch.Tensor]) -> MemoryPeaks:
    """The most bytes that the tensors of one call on a CPU take at once: `held` ones, and all that torch allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    events = [event for event in results.events() if event.name() == "[memory]"] if results else []
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    taken = sum(storages(held).values()) + max(accumulate(changes), default=0)
    return MemoryPeaks(taken, reasons={"peak_reserved_bytes": NO_ACCELERATOR})


def limit_memory(device: DeviceKind, more_bytes: int) -> None:
    """This process may take `more_bytes` more of the GPU's, or of private host memory; beyond it torch raises its own
    error."""
    if device is not DeviceKind.CPU:
        module = module_of(device)
        is_apple = device is DeviceKind.MPS
        whole = module.recommended_max_memory() if is_apple else module.mem_get_info()[1]
        module.set_per_process_memory_fraction(min(1.0, more_bytes / whole))
        return
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    counted = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (counted + more_bytes, hard))


if __name__ == "__main__":
    print(json.dumps(told(DeviceKind(sys.argv[1]))))
