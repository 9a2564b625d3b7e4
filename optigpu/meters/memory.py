"""memory: bytes of the weights as they lie there, and the peaks of host and accelerator over one request."""

import os
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from optigpu.documents.facts import HostPeak, MeterFacts
from optigpu.hardware.sensors import Ticker
from optigpu.meters.base import Reading, Scene
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import OperatorRequest, Request, Runtime

_PROC = Path("/proc/self")
_PERIOD_S = 0.01
_RESET_PEAK = "5"
"""Written to clear_refs, it resets the peak resident set of a process to the present one (man 5 proc)."""


class MemoryMeter:
    """Weights and peaks; one request is run for the peaks."""

    once: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = (
        "weight_bytes",
        "params_total",
        "bytes_per_param",
        "host_peak_bytes",
        "peak_bytes",
        "peak_reserved_bytes",
    )

    def read(self, scene: Scene) -> Reading:
        """Bytes of unique storages, weights counted before the stack, and peaks while one request runs."""
        weights, peaks = _weights(scene.runtime), _peaks(scene.runtime, scene.request)
        return Reading(weights.values | peaks.values, weights.reasons | peaks.reasons, peaks.facts)


class ResidentPeak:
    """The largest resident set that was seen, in bytes, and how often it was looked at."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.samples = 0

    def look(self) -> None:
        """The second number of statm: resident pages (man 5 proc)."""
        pages = int((_PROC / "statm").read_text().split()[1])
        self.peak_bytes = max(self.peak_bytes, pages * os.sysconf("SC_PAGE_SIZE"))
        self.samples += 1


def weight_bytes(model: Any) -> int:
    """Bytes of the storages behind a model's parameters and buffers; what is shared counts once."""
    return _storage_bytes([*model.parameters(), *model.buffers()])


def _storage_bytes(tensors: Iterable[Any]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _weights(runtime: Runtime) -> Reading:
    if runtime.model is None:
        names = ("weight_bytes", "params_total", "bytes_per_param")
        return Reading(reasons=dict.fromkeys(names, "this workload runs no model"))
    size = weight_bytes(runtime.model)
    values = {
        "weight_bytes": size,
        "params_total": runtime.weights,
        "bytes_per_param": size / runtime.weights,
    }
    return Reading(values)


def _peaks(runtime: Runtime, request: Request) -> Reading:
    """The host's peak holds the interpreter, its libraries and the model as well as what the request needs."""
    accelerator = _accelerator_peaks if runtime.device is DeviceKind.CUDA else _no_accelerator
    refusal = _reset_host_peak()
    sampled = ResidentPeak()
    with Ticker(sampled.look, _PERIOD_S):
        reading = accelerator(request)
    exact = _host_peak_bytes() if refusal is None else None
    values = {"host_peak_bytes": max(sampled.peak_bytes, exact or 0), **reading.values}
    host_peak = HostPeak(
        scope="one request, on top of the interpreter, its libraries and the model",
        source=_source(refusal, exact),
        sampled_bytes=sampled.peak_bytes,
        samples=sampled.samples,
    )
    return Reading(values, reading.reasons, MeterFacts(host_peak=host_peak))


def _source(refusal: str | None, exact: int | None) -> str:
    if refusal is None and exact is not None:
        return "VmHWM, the kernel's own high-water mark, reset before the request; it misses nothing"
    why = refusal or "the kernel shows no VmHWM"
    return f"samples at {1 / _PERIOD_S:.0f} Hz, which miss what lasts shorter: {why}"


def _accelerator_peaks(request: Request) -> Reading:
    import torch

    torch.cuda.reset_peak_memory_stats()
    request.run()
    return Reading(
        {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    )


def _no_accelerator(request: Request) -> Reading:
    request.run()
    why = "a CPU has no accelerator memory; see host_peak_bytes"
    if isinstance(request, OperatorRequest):
        return Reading({"peak_bytes": operator_peak_bytes(request)}, {"peak_reserved_bytes": why})
    return Reading(reasons={"peak_bytes": why, "peak_reserved_bytes": why})


def operator_peak_bytes(request: OperatorRequest) -> int:
    """The most bytes that the tensors of one call on a CPU take at once: those it is given, and all that it allocates.

    torch's profiler is told of each allocation of torch's own; memory that a library takes by itself is not counted.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        request.call()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    events = [event for event in results.events() if event.name() == "[memory]"] if results else []
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return _storage_bytes(request.held) + max(accumulate(changes), default=0)


def _reset_host_peak() -> str | None:
    """Makes the high-water mark start again; why it does not, where the kernel refuses."""
    try:
        (_PROC / "clear_refs").write_text(_RESET_PEAK)
    except OSError as error:
        return f"VmHWM cannot be reset here ({error.strerror}) and so tells of the process's whole life"
    return None


def _host_peak_bytes() -> int | None:
    """VmHWM, the high-water mark of the resident set, in bytes; None where the kernel does not show it."""
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
