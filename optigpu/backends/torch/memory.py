"""Free memory of the device, and the peaks during a run."""

import resource
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from optigpu.backends.runtime import MemoryPeaks
from optigpu.backends.torch.device import module_of
from optigpu.hardware.cgroup import free_host_bytes
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.models.loading.storages import storages
from optigpu.vocabulary import DeviceKind

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
