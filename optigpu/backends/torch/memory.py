"""Free memory of the device, and the peaks during a run."""

import resource
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from optigpu.backends.runtime import MemoryPeaks
from optigpu.hardware.memory import free_host_bytes
from optigpu.models.loading.storages import storages
from optigpu.vocabulary import DeviceKind

NO_ACCELERATOR = "a CPU has no accelerator memory; see host_peak_bytes"


def free_bytes(device: DeviceKind) -> int:
    """Free memory of the GPU, or of the host within the process's own limit."""
    return int(torch.cuda.mem_get_info()[0]) if device is DeviceKind.CUDA else free_host_bytes()


def peaks_of(run: Callable[[], object], device: DeviceKind) -> MemoryPeaks:
    """The peaks of CUDA's allocator during `run`, allocated and reserved; on a CPU the reason why there are none."""
    if device is DeviceKind.CPU:
        run()
        reasons = {"peak_bytes": NO_ACCELERATOR, "peak_reserved_bytes": NO_ACCELERATOR}
        return MemoryPeaks(reasons=reasons)
    torch.cuda.reset_peak_memory_stats()
    run()
    return MemoryPeaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def operator_peaks_of(call: Callable[[], object], held: Iterable[torch.Tensor]) -> MemoryPeaks:
    """The most bytes that the tensors of one call on a CPU take at once: `held` ones, and all that it allocates.

    torch's profiler records each allocation of torch; memory that a library allocates itself is not counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    events = [event for event in results.events() if event.name() == "[memory]"] if results else []
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    taken = sum(storages(held).values()) + max(accumulate(changes), default=0)
    return MemoryPeaks(taken, reasons={"peak_reserved_bytes": NO_ACCELERATOR})


def limit_memory(device: DeviceKind, more_bytes: int) -> None:
    """From now on this process may take `more_bytes` more: of CUDA's memory, or of private memory of the host.

    What goes beyond raises torch's own error for memory that ran out, from which a caller can go on.
    """
    if device is DeviceKind.CUDA:
        _, whole = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, more_bytes / whole))
        return
    taken = _private_bytes() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (taken, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _private_bytes() -> int:
    """What RLIMIT_DATA counts: VmData of the kernel's status."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
