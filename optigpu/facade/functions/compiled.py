"""benchmark_torch_compile: a model eager, compiled, and compiled in bfloat16."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from optigpu.facade.benchmark_result import Indexed
from optigpu.facade.functions.timing import (
    ModelFn,
    device_for,
    place_name,
    resnet_50,
    speedup,
    timed_in_turns,
)
from optigpu.hardware import probe
from optigpu.statistics.estimates import Bounds
from optigpu.vocabulary import UnsupportedError

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
