"""Times calls of a caller's own code in this process: the device's clock, and the statistics of every other figure. One
process stands for itself alone: a job measures several (`optigpu.run`). And benchmark_torch_compile: a model eager,
compiled, and compiled in bfloat16."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from optigpu.backends.torch.device import calls_s, clock_for, is_there, kind_of, operator_peaks_of, peaks_of
from optigpu.documents.result import Measurement, MetricSummary
from optigpu.facade.benchmark_result import MEBIBYTE, Indexed
from optigpu.facade.in_process import device_of, interval_ms
from optigpu.hardware import probe
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


MODES = ("default",)
WARMUP = 20


@dataclass(frozen=True)
class CompileRow(Indexed):
    """A pass of one model: its median with the 95% interval in this process, and its speedup over the eager model.
    `compile_s` are the seconds of its first pass, in which it is compiled; None for eager."""

    name: str
    ms: float
    ms_ci: Bounds | None
    speedup: float
    speedup_ci: Bounds | None
    compile_s: float | None


def benchmark_torch_compile(
    model_fn: ModelFn = resnet_50,
    batch_size: int = 32,
    img_size: int = 224,
    n: int = 100,
    device: str | None = None,
    modes: tuple[str, ...] = MODES,
    backend: str = "inductor",
) -> list[CompileRow]:
    """Times a model eager, compiled in each of torch.compile's `modes`, and compiled in bfloat16, in turns.

    `model_fn` is called without arguments for each; the default is preset:resnet-50 with random weights. Mode
    max-autotune searches for minutes, and is left out unless `modes` names it. In bfloat16 the weights are converted
    before compilation. `device` None is CUDA where there is a GPU, and else this CPU.

    Raises UnsupportedError for a CPU without a C++ compiler, which TorchInductor needs, and a device that is not here.

    >>> import torch
    >>> from optigpu import benchmark_torch_compile
    >>> def tiny():
    ...     return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    >>> rows = benchmark_torch_compile(tiny, 1, 8, n=3, device="cpu", backend="eager")  # doctest: +ELLIPSIS
    A pass on this CPU, batch 1, images of 8 x 8
    Eager (FP32): ... ms
    Compiled default: ... ms (...x), first pass ... s
    BF16 + Compiled: ... ms (...x), first pass ... s
    >>> [row["name"] for row in rows]
    ['Eager (FP32)', 'Compiled default', 'BF16 + Compiled']
    """
    place = device_for(device)
    if place.type == "cpu" and backend == "inductor" and probe().compiler is None:
        raise UnsupportedError("TorchInductor needs a C++ compiler on a CPU and there is none; install g++.")
    print(f"A pass on {place_name(place)}, batch {batch_size}, images of {img_size} x {img_size}")
    images = torch.randn(batch_size, 3, img_size, img_size, device=place)
    eager = model_fn().to(place).eval()
    models: dict[str, torch.nn.Module] = {"Eager (FP32)": eager}
    for mode in modes:
        models[f"Compiled {mode}"] = _compiled(model_fn().to(place).eval(), mode, backend)
    halved = model_fn().to(place, torch.bfloat16).eval()
    models["BF16 + Compiled"] = _compiled(halved, modes[0] if modes else "default", backend)
    return _timed(models, images, n)


def _compiled(model: torch.nn.Module, mode: str, backend: str) -> torch.nn.Module:
    # the modes are Inductor's own
    chosen = {"mode": mode} if backend == "inductor" else {}
    model.compile(backend=backend, **chosen)
    return model


def _timed(models: dict[str, torch.nn.Module], images: torch.Tensor, n: int) -> list[CompileRow]:
    dtypes = {name: next(model.parameters()).dtype for name, model in models.items()}
    given = {name: images.to(dtype) for name, dtype in dtypes.items()}
    calls = {name: lambda model=model, name=name: model(given[name]) for name, model in models.items()}
    with torch.inference_mode():
        first = {name: _first_s(call, images.device) for name, call in calls.items()}
        times = timed_in_turns(calls, images.device, warmup=min(WARMUP, n), repeats=n)
    rows = []
    eager = next(iter(times))
    for name, found in times.items():
        gain, bounds = speedup(times[eager], found)
        compile_s = None if name == eager else first[name]
        rows.append(CompileRow(name, found.median_ms, found.ci_ms, gain, bounds, compile_s))
        gained = "" if compile_s is None else f" ({gain:.2f}x), first pass {compile_s:.1f} s"
        print(f"{name}: {found.median_ms:.2f} ms{gained}")
    return rows


def _first_s(call: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
