"""What every runtime of the torch backend has, and the kernels of one request, from torch's profiler.

Loads no transformers, which takes seconds and operators do not need.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from optigpu.backends.runtime import MemoryPeaks, Profile
from optigpu.backends.torch.attention import activities_of
from optigpu.backends.torch.device import Clock, TorchDevice, module_of, peaks_of
from optigpu.documents.facts import Footprint, ImageFootprint, WeightFacts
from optigpu.documents.peaks import Bound
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.hardware.intensity import GLUE, Kernel, Operator, bound_of, bound_of_kernel, flops_of
from optigpu.vocabulary import DeviceKind, UnsupportedError

_FIRST, _STEPS = "optigpu.first", "optigpu.steps"
_COMPILED = "## Call CompiledFxGraph"

_ITEM_BYTES = {
    **dict.fromkeys(("double", "long int"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("short int", "c10::Half", "c10::BFloat16"), 2),
    **dict.fromkeys(("signed char", "unsigned char", "bool", "c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
}
"""Bytes of an element by the profiler's names of types (the compiler's, demangled)."""


class Recording:
    """A profiler in the place of a clock: a request's marks, at its start and after each token, say what to record."""

    def __init__(self, clock: Clock, device: DeviceKind, steps: int) -> None:
        """Raises UnsupportedError for a device whose kernels torch's profiler does not see."""
        reason = KINDS[device].lacks.get(Ability.PROFILE)
        if reason:
            raise UnsupportedError(f"There is no profile on {device}: {reason}.")
        self._profiler = profile(activities=activities_of(device), record_shapes=True, with_flops=True)
        self._clock = clock
        self._device = device
        self._wanted = steps
        self._marks = 0
        self._running = False
        self._range: record_function | None = None

    @property
    def steps(self) -> int:
        return max(0, self._marks - 2)

    @property
    def recorded_steps(self) -> int:
        return min(self.steps, self._wanted)

    def start(self) -> None:
        self._profiler.start()
        self._running = True

    def stop(self) -> None:
        """Ends the recording; a second time does nothing."""
        if self._running:
            self._running = False
            self._enter(None)
            self._profiler.stop()

    def mark(self) -> Any:
        """The clock's own mark, after the phase was changed."""
        self._marks += 1
        if self._running and self._marks <= 2:
            self._enter(_FIRST if self._marks == 1 else _STEPS)
        elif self._marks == 2 + self._wanted:
            self.stop()
        return self._clock.mark()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The clock's own seconds; who asks for them is done, and copies its results, which is not recorded."""
        self.stop()
        return self._clock.seconds(marks)

    def export(self, path: Path) -> None:
        self._profiler.export_chrome_trace(str(path))

    def kernels(self) -> list[Kernel]:
        events = self._profiler.events() or []
        starts = [event.time_range.start for event in events if event.name == _STEPS]
        steps_from = min(starts, default=float("inf"))
        ratio = self.steps / self.recorded_steps if self.recorded_steps else 1.0
        found = _on_cpu(events) if self._device is DeviceKind.CPU else _on_gpu(events, self._device)
        return [
            Kernel(
                name,
                seconds,
                bound,
                ratio if at >= steps_from else 1.0,
                at >= steps_from,
                operator.input_bytes if operator else None,
                (flops_of(operator) or None) if operator else None,
            )
            for name, seconds, bound, at, operator in found
        ]

    def _enter(self, name: str | None) -> None:
        """Closes one named range and opens the next; waits for the device in between."""
        if self._device is not DeviceKind.CPU:
            module_of(self._device).synchronize()
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if name is not None:
            self._range = record_function(name)
            self._range.__enter__()


Found = tuple[str, float, Bound | None, float, Operator | None]
"""A kernel's name, its seconds, what bounds it, the microsecond at which it was launched, and the operator that is this
kernel alone."""


def _on_cpu(events: Iterable[Any]) -> Iterable[Found]:
    """An operator's own time is its kernel. A compiled graph on a CPU is one: the profiler does not look into it."""
    for event in events:
        seconds, at = event.self_cpu_time_total / 1e6, event.time_range.start
        if event.name.startswith(_COMPILED):
            yield "compiled graph", seconds, None, at, None
        elif "::" in event.name and event.name not in GLUE:
            operator = _operator(event)
            yield event.name, seconds, bound_of(operator, DeviceKind.CPU), at, operator


def _on_gpu(events: Sequence[Any], device: DeviceKind) -> Iterable[Found]:
    """Kernels by the operator that launched them; then those that no operator launched, such as a CUDA graph's."""
    launched: Counter[tuple[str, int]] = Counter()
    of_gpu = f"DeviceType.{KINDS[device].activity}"
    for event in events:
        for kernel in event.kernels:
            operator = _operator(event)
            bound = bound_of(operator, device) or bound_of_kernel(kernel.name)
            launched[_key(kernel.name, kernel.duration)] += 1
            whole = operator if len(event.kernels) == 1 else None
            yield kernel.name, kernel.duration / 1e6, bound, event.time_range.start, whole
    for event in events:
        if str(event.device_type) != of_gpu or event.name.startswith("optigpu."):
            continue
        microseconds = event.time_range.elapsed_us()
        key = _key(event.name, microseconds)
        if launched[key]:
            launched[key] -= 1
        else:
            yield event.name, microseconds / 1e6, bound_of_kernel(event.name), event.time_range.start, None


def _key(name: str, microseconds: float) -> tuple[str, int]:
    return name, round(microseconds * 1e3)


def _operator(event: Any) -> Operator:
    """torch before 2.13 tells no types; then bytes are unknown."""
    shapes = event.input_shapes or []
    types = getattr(event, "input_dtypes", None) or [""] * len(shapes)
    tensors = [
        (tuple(shape), _ITEM_BYTES.get(kind))
        for shape, kind in zip(shapes, types, strict=True)
        if shape or kind in _ITEM_BYTES
    ]
    shapes, sizes = (tuple(each) for each in zip(*tensors, strict=True)) if tensors else ((), ())
    return Operator(event.name, shapes, sizes, int(event.flops or 0))


class TorchRuntime:
    """The methods of every runtime, which need no model. `place` is the device; a profiler replaces its clock."""

    def __init__(self, place: TorchDevice) -> None:
        self._place = place
        self.device = place.device
        self.seed = place.seed
        self.notes = place.notes

    def weights(self) -> WeightFacts | None:
        return None

    def footprint(self) -> Footprint | ImageFootprint | None:
        return None

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        return peaks_of(run, self.device)

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """Of a request that decodes, the first token and `steps` steps are recorded; of another one all of it."""
        clock = self._place.clock
        self._place.clock = recording = Recording(clock, self.device, steps)
        try:
            recording.start()
            run()
        finally:
            self._place.clock = clock
            recording.stop()
        kernels = recording.kernels()
        if kernels:
            recording.export(trace)
        return Profile(tuple(kernels), recording.steps, recording.recorded_steps)

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Names what happens within on CUDA's time line (NVTX), for an external profiler such as Nsight Systems."""
        return torch.cuda.nvtx.range(name) if self.device is DeviceKind.CUDA else nullcontext()
