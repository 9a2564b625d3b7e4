"""Memory of the device: what is free, and the peaks over a run."""

from collections.abc import Callable, Iterable
from itertools import accumulate

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from optigpu.backends.runtime import MemoryPeaks
from optigpu.hardware.cgroup import memory_limit
from optigpu.models.loading.footprint import storages
from optigpu.vocabulary import DeviceKind

NO_ACCELERATOR = "a CPU has no accelerator memory; see host_peak_bytes"


def free_bytes(device: DeviceKind) -> int:
    """Free memory of the GPU, or of the host within the process's own limit."""
    if device is DeviceKind.CUDA:
        return int(torch.cuda.mem_get_info()[0])
    available = int(psutil.virtual_memory().available)
    limit = memory_limit()
    return available if limit is None else min(available, limit)


def peaks_of(run: Callable[[], object], device: DeviceKind) -> MemoryPeaks:
    """What CUDA's allocator gave out and held during `run`; on a CPU the reason why there is neither."""
    if device is DeviceKind.CPU:
        run()
        reasons = {"peak_bytes": NO_ACCELERATOR, "peak_reserved_bytes": NO_ACCELERATOR}
        return MemoryPeaks(reasons=reasons)
    torch.cuda.reset_peak_memory_stats()
    run()
    return MemoryPeaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def operator_peaks_of(call: Callable[[], object], held: Iterable[torch.Tensor]) -> MemoryPeaks:
    """The most bytes that the tensors of one call on a CPU take at once: `held` ones, and all that it allocates.

    torch's profiler is told of each allocation of torch's own; memory that a library takes by itself is not counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    events = [event for event in results.events() if event.name() == "[memory]"] if results else []
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    taken = sum(storages(held).values()) + max(accumulate(changes), default=0)
    return MemoryPeaks(taken, reasons={"peak_reserved_bytes": NO_ACCELERATOR})
