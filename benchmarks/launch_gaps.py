"""`python -m benchmarks.launch_gaps`: what lies between the kernels of one decode step, rung by rung, on a GPU.

A step at batch 1 in the middle of a text, on random weights of a preset's shapes. The rungs are gpt-fast's model
operator by operator, compiled, and compiled and recorded as a CUDA graph; then our decoder's kernels launched one by
one, and their recorded graph. A step's time is measured without a profiler. When a kernel ran, and how many were
launched, is from a profile of the same steps; what is left of the step's time is the gap. Off a GPU there are no
figures.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.document import write
from benchmarks.gpt_fast_recipe import GptFastModel, Shapes, Weights, compiled
from benchmarks.gpu_decode import (
    MIDDLE,
    NO_GPU,
    OURS,
    SHAPE,
    WEIGHTS,
    cache_bytes,
    copy_bandwidth,
    program_bytes,
    random_program,
    seconds_of,
    shapes_of,
)
from optigpu.hardware import probe
from optigpu.ops.decode.cuda.decode_step import CudaDecodeStep
from optigpu.ops.decode.program import Program
from optigpu.report.formats import Grid, columns, console, terminal
from optigpu.vocabulary import DeviceKind, OptiGPUError

CAPACITY = sum(SHAPE)
WARM_UPS, ROUNDS = 3, 9
COSTLIEST = 5
"""Kernels that are named, by their time."""


class Interval(NamedTuple):
    """When a kernel, a copy or a fill ran on the device, on the profiler's clock."""

    name: str
    start_s: float
    end_s: float


class KernelTime(NamedTuple):
    """All of a step's launches of one kernel."""

    name: str
    launches: float
    seconds: float


@dataclass(frozen=True)
class Breakdown:
    """A step: the time in which at least one kernel ran, what is left of the step, and what was launched.

    `gap_s` is below 0 where the profiled kernels took longer than the step without a profiler.
    """

    step_s: float
    busy_s: float
    launches: float
    costliest: tuple[KernelTime, ...]

    @property
    def gap_s(self) -> float:
        return self.step_s - self.busy_s

    @property
    def gap_per_launch_s(self) -> float:
        return self.gap_s / self.launches


def breakdown(intervals: Sequence[Interval], steps: int, step_s: float) -> Breakdown:
    """Of `steps` profiled steps, each of which takes `step_s` without the profiler.

    Raises ValueError if there is no interval or no step, or an interval ends before it starts.
    """
    if not intervals or steps < 1:
        raise ValueError(
            f"A breakdown needs kernels and steps, not {len(intervals)} kernels in {steps} steps."
        )
    return Breakdown(step_s, busy(intervals) / steps, len(intervals) / steps, costliest(intervals, steps))


def busy(intervals: Sequence[Interval]) -> float:
    """Seconds in which at least one of them ran: what overlaps counts once."""
    total, until = 0.0, float("-inf")
    for name, start, end in sorted(intervals, key=lambda each: each.start_s):
        if end < start:
            raise ValueError(f"{name} ends before it starts.")
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def costliest(intervals: Sequence[Interval], steps: int) -> tuple[KernelTime, ...]:
    """The kernels that take the most time in a step, the costliest first."""
    seconds: dict[str, list[float]] = {}
    for name, start, end in intervals:
        seconds.setdefault(name, []).append(end - start)
    found = [KernelTime(name, len(each) / steps, sum(each) / steps) for name, each in seconds.items()]
    return tuple(sorted(found, key=lambda kernel: kernel.seconds, reverse=True)[:COSTLIEST])


@dataclass(frozen=True)
class Prepared:
    """`begin` goes to where so many steps are around the middle of a text. `step_bytes`: what a step reads."""

    begin: Callable[[int], object]
    step: Callable[[], object]
    step_bytes: int


@dataclass(frozen=True)
class RungKind:
    name: str
    prepare: Callable[[Shapes, Weights], Prepared]


def measured(kind: RungKind, shapes: Shapes, weights: Weights, steps: int) -> tuple[int, Breakdown]:
    """The bytes of a step and its breakdown; the memory is given back."""
    prepared = kind.prepare(shapes, weights)
    try:
        rounds = [_round(prepared, steps) for _ in range(WARM_UPS + ROUNDS)]
        step_s = statistics.median(rounds[WARM_UPS:]) / steps
        return prepared.step_bytes, breakdown(_profiled(prepared, steps), steps, step_s)
    finally:
        del prepared
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _round(prepared: Prepared, steps: int) -> float:
    """Seconds of so many steps, with one wait for the device at the end."""
    prepared.begin(steps)
    return seconds_of(lambda: _take(prepared, steps))


def _take(prepared: Prepared, steps: int) -> None:
    for _ in range(steps):
        prepared.step()


def _profiled(prepared: Prepared, steps: int) -> list[Interval]:
    """What ran on the device in so many steps; the operators are not recorded, which would slow the launches."""
    prepared.begin(steps)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _take(prepared, steps)
        torch.cuda.synchronize()
    results: Any = profiler.profiler.kineto_results if profiler.profiler else None
    found = [
        Interval(event.name(), event.start_ns() / 1e9, event.end_ns() / 1e9)
        for event in (results.events() if results else [])
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    ]
    if not found:
        raise OptiGPUError(
            "The profiler saw no kernel on this GPU; check whether something else profiles it."
        )
    return found


def _recipe(
    shapes: Shapes, weights: Weights, how: Callable[[GptFastModel], Callable[..., object]]
) -> Prepared:
    """gpt-fast's step, always at the same position; `how` makes what runs it."""
    with torch.device("cuda"):
        model = GptFastModel(shapes, weights, CAPACITY)
        token, position = torch.zeros(1, 1, dtype=torch.int64), torch.full((1,), MIDDLE)
    run = how(model)

    def step() -> None:
        with torch.no_grad():
            run(token, position)

    return Prepared(lambda _: None, step, model.weight_bytes() + cache_bytes(shapes))


def _eager(shapes: Shapes, weights: Weights) -> Prepared:
    """Operator by operator, with the attention that torch chooses."""
    return _recipe(shapes, weights, lambda model: model)


def _compiled(shapes: Shapes, weights: Weights) -> Prepared:
    """Fused kernels, launched one by one."""
    return _recipe(shapes, weights, partial(compiled, recorded=False))


def _compiled_graph(shapes: Shapes, weights: Weights) -> Prepared:
    return _recipe(shapes, weights, compiled)


def _ours(shapes: Shapes, weights: Weights) -> Prepared:
    """Our kernels, launched one by one; each step goes on by a token."""
    program = _program(shapes, weights)
    return _of_step(CudaDecodeStep(program, "bf16", 1, CAPACITY), program, shapes)


def _ours_graph(shapes: Shapes, weights: Weights) -> Prepared:
    program = _program(shapes, weights)
    decode_step = CudaDecodeStep(program, "bf16", 1, CAPACITY)
    decode_step.record()
    return _of_step(decode_step, program, shapes)


def _program(shapes: Shapes, weights: Weights) -> Program:
    return random_program(shapes, OURS[weights][0], CAPACITY)


def _of_step(decode_step: CudaDecodeStep, program: Program, shapes: Shapes) -> Prepared:
    def begin(steps: int) -> None:
        decode_step.state.position.fill_(MIDDLE - steps // 2)

    size = program_bytes(program) + cache_bytes(shapes)
    return Prepared(begin, lambda: decode_step.run(), size)


RUNGS = (
    RungKind("eager", _eager),
    RungKind("torch.compile", _compiled),
    RungKind("torch.compile, CUDA graph", _compiled_graph),
    RungKind("our kernels, launched", _ours),
    RungKind("our kernels, CUDA graph", _ours_graph),
)


@dataclass(frozen=True)
class Rung:
    """`step_bytes`: what a step reads of weights and cache."""

    name: str
    step_bytes: int
    breakdown: Breakdown


def shown(title: str, rungs: Sequence[Rung], bandwidth: float) -> Grid:
    """The figures as a table for a person."""
    rows = []
    for rung in rungs:
        found, limit_s = rung.breakdown, rung.step_bytes / bandwidth
        rows.append(
            (
                rung.name,
                *map(_microseconds, (found.step_s, found.busy_s, found.gap_s)),
                f"{found.launches:.0f}",
                _microseconds(found.gap_per_launch_s, 2),
                _microseconds(limit_s),
                f"{limit_s / found.step_s:.0%}",
            )
        )
    headings = ("step:", "kernels ran:", "gap:", "launches:", "gap a launch:", "limit:", "share:")
    return Grid(title, columns("rung", *headings), tuple(rows))


def kernels_shown(rung: Rung) -> Grid:
    """Where a rung's kernel time goes."""
    rows = (
        (kernel.name, f"{kernel.launches:.0f}", _microseconds(kernel.seconds))
        for kernel in rung.breakdown.costliest
    )
    title = f"{rung.name}: the costliest kernels of a step"
    return Grid(title, columns("kernel", "launches:", "time:"), tuple(rows))


def figures(rung: Rung) -> dict[str, object]:
    """As JSON."""
    found = rung.breakdown
    derived = {"gap_s": found.gap_s, "gap_per_launch_s": found.gap_per_launch_s}
    about = asdict(found) | {"costliest": [kernel._asdict() for kernel in found.costliest]}
    return {"rung": rung.name, "step_bytes": rung.step_bytes, **about, **derived}


def _microseconds(seconds: float, digits: int = 1) -> str:
    return f"{seconds * 1e6:.{digits}f} us"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; ends with status 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch_gaps", description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["gpt2", "llama-3.2-1b"])
    parser.add_argument("--weights", nargs="+", default=["bf16", "int4"], choices=WEIGHTS)
    parser.add_argument("--rungs", nargs="+", metavar="RUNG", help="their names (default: all)")
    parser.add_argument("--steps", type=int, default=64, help="steps that are timed, and then profiled")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args(arguments)
    if not 1 <= options.steps <= SHAPE[1]:
        parser.error(f"--steps must be from 1 to {SHAPE[1]}, not {options.steps}")
    try:
        return _run(options)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2


def _run(options: argparse.Namespace) -> int:
    if not probe().has(DeviceKind.CUDA):
        raise OptiGPUError(NO_GPU)
    bandwidth = copy_bandwidth()
    console().print(f"a copy moves {bandwidth / 1e9:.0f} GB/s, read and written", markup=False)
    tables: dict[str, list[Rung]] = {}
    for preset in options.presets:
        for weights in options.weights:
            rungs = tables[f"{preset} {weights}"] = _measured(preset, weights, options)
            title = f"preset:{preset}, {weights}, batch 1, a step after {MIDDLE} tokens"
            console().print(terminal(shown(title, rungs, bandwidth)))
            for rung in rungs:
                console().print(terminal(kernels_shown(rung)))
            if options.output:  # after each table, since who rents a GPU may have to stop
                found = {name: [figures(rung) for rung in rungs] for name, rungs in tables.items()}
                about = {"bandwidth": bandwidth, "steps": options.steps, "tables": found}
                write(options.output, "launch_gaps", about)
    return 0


def _measured(preset: str, weights: Weights, options: argparse.Namespace) -> list[Rung]:
    kinds, shapes = {rung.name: rung for rung in RUNGS}, shapes_of(preset)
    chosen: list[str] = options.rungs or list(kinds)
    for name in chosen:
        if name not in kinds:
            raise OptiGPUError(f"There is no rung {name!r}; there are {', '.join(map(repr, kinds))}.")
    return [Rung(name, *measured(kinds[name], shapes, weights, options.steps)) for name in chosen]


if __name__ == "__main__":
    sys.exit(main())
