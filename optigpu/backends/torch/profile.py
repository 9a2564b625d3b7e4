"""The kernels of one request, from torch's profiler."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from optigpu.backends.runtime import Profile
from optigpu.backends.torch.attention import activities_of
from optigpu.backends.torch.clock import Clock, calls_s
from optigpu.backends.torch.device import TorchDevice, kind_of, module_of
from optigpu.backends.torch.memory import peaks_of
from optigpu.documents.peaks import Bound
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.hardware.intensity import GLUE, Kernel, Operator, bound_of, bound_of_kernel, flops_of
from optigpu.vocabulary import DeviceKind, UnsupportedError

_FIRST, _STEPS = "optigpu.first", "optigpu.steps"
_COMPILED = "## Call CompiledFxGraph"

_ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "short int": 2,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
"""Bytes of an element by the profiler's names of types (the compiler's, demangled)."""


def profiled(place: TorchDevice, run: Callable[[], object], steps: int, trace: Path) -> Profile:
    """Runs `run`, one request, under the profiler; writes the trace to `trace` if any kernel was seen.

    Of a request that decodes, the first token and `steps` steps are recorded; of another one all of it.
    """
    clock = place.clock
    recording = Recording(clock, place.device, steps)
    place.clock = recording
    try:
        recording.start()
        run()
    finally:
        place.clock = clock
        recording.stop()
    kernels = recording.kernels()
    if kernels:
        recording.export(trace)
    return Profile(tuple(kernels), recording.steps, recording.recorded_steps)


class Recording:
    """A profiler, and the clock that tells it where the first token ends and when enough steps are recorded.

    A request marks its clock at its start and after each token, so an object that replaces the clock knows where the
    request is.
    """

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
        """Decode steps of the request: its tokens after the first."""
        return max(0, self._marks - 2)

    @property
    def recorded_steps(self) -> int:
        """Those that were recorded."""
        return min(self.steps, self._wanted)

    def start(self) -> None:
        """Begins to record."""
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
        if self._running and self._marks == 1:
            self._enter(_FIRST)
        elif self._running and self._marks == 2:
            self._enter(_STEPS)
        elif self._marks == 2 + self._wanted:
            self.stop()
        return self._clock.mark()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The clock's own seconds; who asks for them is done, and copies its results, which is not recorded."""
        self.stop()
        return self._clock.seconds(marks)

    def export(self, path: Path) -> None:
        """Writes the trace in Chrome's format, compressed."""
        self._profiler.export_chrome_trace(str(path))

    def kernels(self) -> list[Kernel]:
        """Every kernel that was recorded."""
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
    return Operator(
        event.name,
        tuple(shape for shape, _ in tensors),
        tuple(size for _, size in tensors),
        int(event.flops or 0),
    )


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
