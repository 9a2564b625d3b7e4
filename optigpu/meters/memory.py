"""memory: bytes of the weights with the stack applied, and the peaks of host and accelerator during one request."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from optigpu.backends.runtime import Runtime
from optigpu.documents.facts import HostPeak, MeterFacts
from optigpu.documents.selftest import Comparison
from optigpu.hardware.sensors import Ticker
from optigpu.meters.base import Meter, MeterContext, Reading, require_read
from optigpu.vocabulary import ReplicateError
from optigpu.workloads.base import Request

HELD_BYTES, HELD_S = 2**27, 0.1
"""What the self-test's request holds, and for how long: ten looks of the ticker."""
_PROC = Path("/proc/self")
_PERIOD_S = 0.01
_RESET_PEAK = "5"
"""Written to clear_refs, it resets the peak resident set of a process to the present one (man 5 proc)."""


class MemoryMeter(Meter):
    """Weights and peaks; one request is run for the peaks."""

    metrics: ClassVar[tuple[str, ...]] = (
        "weight_bytes",
        "params_total",
        "params_trainable",
        "bytes_per_param",
        "quantized_share",
        "host_peak_bytes",
        "peak_bytes",
        "peak_reserved_bytes",
    )

    def read(self, context: MeterContext) -> Reading:
        """Bytes of unique storages, weights counted before the stack, and peaks while one request runs."""
        weights, peaks = _weights(context.runtime), _peaks(context.runtime, context.request)
        return Reading(weights.values | peaks.values, weights.reasons | peaks.reasons, peaks.facts)

    def self_test(self, context: MeterContext) -> Comparison:
        """The host's peak must rise by what a request holds. Raises ReplicateError if a peak is below the weights."""
        before = ResidentPeak()
        before.look()
        reading = self.read(replace(context, request=_Holding(context.request)))
        require_read(reading, "host_peak_bytes", "weight_bytes")
        peak = reading.values.get("peak_bytes")
        if peak is not None and peak < reading.values["weight_bytes"]:
            raise ReplicateError(f"The accelerator's peak of {peak:.0f} B is below the bytes of the weights.")
        rise = reading.values["host_peak_bytes"] - before.peak_bytes
        return Comparison(abs(rise - HELD_BYTES) / HELD_BYTES, 0.25, "the bytes that a request holds")


class _Holding:
    """A request that holds HELD_BYTES of the host's memory for a while, and does nothing else."""

    def __init__(self, request: Request) -> None:
        self.look, self.check, self.observe = request.look, request.check, request.observe
        self.described, self.fresh = request.described, request.fresh

    def run(self) -> Mapping[str, float]:
        held = bytearray(b"1") * HELD_BYTES
        time.sleep(HELD_S)
        return {"held": float(len(held))}


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


def _weights(runtime: Runtime) -> Reading:
    facts = runtime.weights()
    if facts is None:
        names = ("weight_bytes", "params_total", "params_trainable", "bytes_per_param", "quantized_share")
        return Reading(reasons=dict.fromkeys(names, "this workload runs no model"))
    if facts.parameters == 0:
        none = dict.fromkeys(("bytes_per_param", "quantized_share"), "the model has no weights")
        return Reading(dict.fromkeys(("weight_bytes", "params_total"), 0.0), none)
    each = None if facts.bytes is None or facts.parameters is None else facts.bytes / facts.parameters
    why = "the engine does not say how many bytes or weights its model has"
    found = {
        "weight_bytes": (facts.bytes, why),
        "params_total": (facts.parameters, why),
        "bytes_per_param": (each, why),
        "params_trainable": (facts.trainable, "this workload trains nothing"),
        "quantized_share": (
            facts.quantized,
            "no weight is quantized, or the engine does not say how many are",
        ),
    }
    known = {name: float(value) for name, (value, _) in found.items() if value is not None}
    return Reading(known, {name: reason for name, (_, reason) in found.items() if name not in known})


def _peaks(runtime: Runtime, request: Request) -> Reading:
    """The host's peak holds the interpreter, its libraries and the model as well as what the request needs."""
    refusal, sampled = None, ResidentPeak()
    try:
        (_PROC / "clear_refs").write_text(_RESET_PEAK)  # the high-water mark starts again
    except OSError as error:
        refusal = f"VmHWM cannot be reset here ({error.strerror}) and so tells of the process's whole life"
    with Ticker(sampled.look, _PERIOD_S):
        peaks = runtime.peak_memory(request.run)
    found = [line for line in (_PROC / "status").read_text().splitlines() if line.startswith("VmHWM:")]
    exact = int(found[0].split()[1]) * 1024 if found and refusal is None else None
    source = "VmHWM, the kernel's own high-water mark, reset before the request; it includes every peak"
    if exact is None:
        why = refusal or "the kernel shows no VmHWM"
        source = f"samples at {1 / _PERIOD_S:.0f} Hz, which miss what lasts shorter: {why}"
    values = {
        "host_peak_bytes": max(sampled.peak_bytes, exact or 0),
        "peak_bytes": peaks.allocated_bytes,
        "peak_reserved_bytes": peaks.reserved_bytes,
    }
    host_peak = HostPeak(
        scope="one request, on top of the interpreter, its libraries and the model",
        source=source,
        sampled_bytes=sampled.peak_bytes,
        samples=sampled.samples,
    )
    known = {
        name: float(value)
        for name, value in values.items()
        if value is not None and name not in peaks.reasons
    }
    return Reading(known, peaks.reasons, MeterFacts(host_peak=host_peak))
