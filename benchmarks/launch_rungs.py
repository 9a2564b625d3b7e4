"""The rungs of `benchmarks.launch_gaps`: ways to launch the same decode step on an NVIDIA GPU, and how one is measured.

A step is that of gpt-fast's recipe, or of our decoder; both take the middle of a text of SHAPE.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpt_fast_recipe import GptFastModel, Shapes, Weights, compiled
from benchmarks.gpu_decode import MIDDLE, OURS, SHAPE, cache_bytes, program_bytes, random_program, seconds_of
from benchmarks.launch_breakdown import Breakdown, Interval, breakdown
from optigpu.ops.decode.cuda.decode_step import CudaDecodeStep
from optigpu.ops.decode.cuda.recorded_step import RecordedStep
from optigpu.ops.decode.program import Program
from optigpu.vocabulary import OptiGPUError

CAPACITY = sum(SHAPE)
WARM_UPS, ROUNDS = 3, 9


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


def _of_step(decode_step: RecordedStep, program: Program, shapes: Shapes) -> Prepared:
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
