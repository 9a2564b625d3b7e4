"""`python -m benchmarks.launch_gaps`: what lies between the kernels of one decode step, rung by rung, on a GPU.

A step at batch 1 in the middle of a text, on random weights of a preset's shapes. The rungs are gpt-fast's model
operator by operator, compiled, and compiled and recorded as a CUDA graph; then our decoder's kernels launched one by
one, and their recorded graph. A step's time is measured without a profiler. When a kernel ran, and how many were
launched, is from a profile of the same steps; what is left of the step's time is the gap. Off a GPU there are no
figures.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.document import write
from benchmarks.gpu_decode import MIDDLE, NO_GPU, SHAPE, WEIGHTS, copy_bandwidth, shapes_of
from benchmarks.launch_breakdown import Breakdown
from optigpu.hardware import probe
from optigpu.report import console
from optigpu.vocabulary import DeviceKind, OptiGPUError

if TYPE_CHECKING:
    from benchmarks.gpt_fast_recipe import Weights


@dataclass(frozen=True)
class Rung:
    """`step_bytes`: what a step reads of weights and cache."""

    name: str
    step_bytes: int
    breakdown: Breakdown


def shown(title: str, rungs: Sequence[Rung], bandwidth: float) -> Table:
    """The figures as a table for a person."""
    grid = Table(title=title, title_justify="left")
    for heading in ("rung", "step", "kernels ran", "gap", "launches", "gap a launch", "limit", "share"):
        grid.add_column(heading, justify="left" if heading == "rung" else "right")
    for rung in rungs:
        found, limit_s = rung.breakdown, rung.step_bytes / bandwidth
        grid.add_row(
            rung.name,
            _microseconds(found.step_s),
            _microseconds(found.busy_s),
            _microseconds(found.gap_s),
            f"{found.launches:.0f}",
            _microseconds(found.gap_per_launch_s, 2),
            _microseconds(limit_s),
            f"{limit_s / found.step_s:.0%}",
        )
    return grid


def kernels_shown(rung: Rung) -> Table:
    """Where a rung's kernel time goes."""
    grid = Table(title=f"{rung.name}: the costliest kernels of a step", title_justify="left")
    for heading in ("kernel", "launches", "time"):
        grid.add_column(heading, justify="left" if heading == "kernel" else "right")
    for kernel in rung.breakdown.costliest:
        grid.add_row(kernel.name, f"{kernel.launches:.0f}", _microseconds(kernel.seconds))
    return grid


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
            console().print(shown(title, rungs, bandwidth))
            for rung in rungs:
                console().print(kernels_shown(rung))
            if options.output:  # after each table, since who rents a GPU may have to stop
                found = {name: [figures(rung) for rung in rungs] for name, rungs in tables.items()}
                about = {"bandwidth": bandwidth, "steps": options.steps, "tables": found}
                write(options.output, "launch_gaps", about)
    return 0


def _measured(preset: str, weights: "Weights", options: argparse.Namespace) -> list[Rung]:
    from benchmarks.launch_rungs import RUNGS, measured

    kinds, shapes = {rung.name: rung for rung in RUNGS}, shapes_of(preset)
    chosen: list[str] = options.rungs or list(kinds)
    for name in chosen:
        if name not in kinds:
            raise OptiGPUError(f"There is no rung {name!r}; there are {', '.join(map(repr, kinds))}.")
    return [Rung(name, *measured(kinds[name], shapes, weights, options.steps)) for name in chosen]


if __name__ == "__main__":
    sys.exit(main())
