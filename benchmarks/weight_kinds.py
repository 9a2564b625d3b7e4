"""`python -m benchmarks.weight_kinds`: how fast is a decode step with each kind of packed weights?

Programs of a preset's shapes and random numbers, which change no speed, are resident in one process, one for each kind,
and take turns of some steps each; who begins rotates. Kinds whose values are looked up run once for each instruction
set that was asked for. Figures are medians over the turns, ratios those of w4 with the best instruction set in the same
turn, with a 95% interval over the turns. Goal: w4k is as fast as w4; its interval does not begin below 0.97.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
from rich.progress import track
from rich.table import Table

from benchmarks.document import write
from benchmarks.native_program import shaped_program
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.cpu import one_cpu_of_each_core
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.decoder import (
    INSTRUCTION_SETS,
    CpuDecoder,
    CpuInstructions,
    best_instruction_set,
)
from optigpu.ops.decode.cpu.placement import shared_matrices
from optigpu.ops.decode.program import UNEVEN, Program, WeightKind
from optigpu.report import console
from optigpu.statistics.decisions import MARGIN
from optigpu.statistics.intervals import Bounds, interval
from optigpu.vocabulary import OptiGPUError

FIRST: WeightKind = "w4"
"""The kind that the others are compared with."""
SHOULD: WeightKind = "w4k"
"""The kind that the goal is about."""
GOAL = 1 - MARGIN
"""Of w4's tokens/s, where the interval of the ratio may begin: what is within 3% counts as equal everywhere."""
PROMPT = 64


@dataclass(frozen=True)
class Row:
    """What a kind of weights came to with one instruction set, turn by turn; a ratio is one of the same turn."""

    kind: WeightKind
    instruction_set: CpuInstructions
    bytes: int
    rates: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median over the turns."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> Bounds | None:
        """Of the ratio, corrected for turns that follow each other; None of too few turns."""
        return interval((self.ratios,))


@dataclass
class Decoding:
    """A decoder that goes on from the token that it chose last."""

    kind: WeightKind
    instruction_set: CpuInstructions
    bytes: int
    decoder: CpuDecoder
    last: torch.Tensor

    def rate(self, steps: int) -> float:
        """tokens/s of so many steps."""
        began = time.perf_counter()
        self.last = self.decoder.decode(self.last, steps)[:, -1:]
        return steps / (time.perf_counter() - began)


def main() -> int:
    """Prints the table; 0 where the goal is reached."""
    options = _options()
    try:
        rows = measured(decodings_of(options), options.turns, options.steps)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    console().print(table_of(rows, options))
    reached = is_reached(rows)
    if options.output:
        about = {"goal": GOAL, "reached": reached, "preset": options.preset, "group": options.group}
        about |= {"threads": options.threads, "steps": options.steps}
        rows_of = [{**asdict(row), "ratio": row.ratio, "interval": row.interval} for row in rows]
        write(options.output, "weight_kinds", about | {"rows": rows_of})
    return 0 if reached else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_kinds", description=__doc__)
    parser.add_argument("--preset", default="llama-3.2-1b", help="whose sizes the programs have")
    parser.add_argument("--group", type=int, default=32, help="inputs that share a scale")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--steps", type=int, default=16, help="of a turn")
    kinds = [kind for kind in get_args(WeightKind) if kind not in (FIRST, "bf16")]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help=f"beside {FIRST}")
    parser.add_argument(
        "--instruction-sets",
        nargs="+",
        choices=list(INSTRUCTION_SETS),
        default=["best"],
        help="for the kinds whose values are looked up",
    )
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    return parser.parse_args()


def decodings_of(options: argparse.Namespace) -> list[Decoding]:
    """One of w4, and those that were asked for."""
    facts = facts_of(parse_reference(f"preset:{options.preset}"))
    if not isinstance(facts, ModelFacts):
        raise OptiGPUError(f"preset:{options.preset} is no language model.")
    length = PROMPT + (options.turns + 1) * options.steps
    made = []
    for kind in (FIRST, *options.kinds):
        program = shaped_program(facts, length, options.group, kind)
        sets: list[CpuInstructions] = options.instruction_sets if kind in UNEVEN else ["best"]
        made += [decoding_of(program, kind, each, options.threads, length) for each in sets]
    return made


def decoding_of(
    program: Program, kind: WeightKind, instruction_set: CpuInstructions, threads: int, length: int
) -> Decoding:
    """A decoder that has read a prompt."""
    decoder = CpuDecoder(
        program, threads=threads, instruction_set=instruction_set, cpus=one_cpu_of_each_core()
    )
    decoder.begin(1, length)
    source = torch.Generator().manual_seed(0)
    prompt = torch.randint(program.vocabulary, (1, PROMPT), generator=source)
    last = decoder.extend(prompt).argmax(-1, keepdim=True)
    name = best_instruction_set() if instruction_set == "best" else instruction_set
    return Decoding(kind, name, read_bytes(program), decoder, last)


def read_bytes(program: Program) -> int:
    """Bytes of the weights that a step reads."""
    tensors = (
        tensor
        for matrix, *_ in shared_matrices(program)
        for tensor in (matrix.numbers, matrix.scale, matrix.unit)
    )
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def measured(decodings: Sequence[Decoding], turns: int, steps: int) -> list[Row]:
    """All take turns; the first turn warms up."""
    rates: list[list[float]] = [[] for _ in decodings]
    for turn in track(range(turns + 1), "taking turns", console=console(stderr=True)):
        for place in range(len(decodings)):
            index = (turn + place) % len(decodings)
            rate = decodings[index].rate(steps)
            if turn:
                rates[index].append(rate)
    return [
        Row(
            *(each.kind, each.instruction_set, each.bytes, tuple(found)),
            tuple(a / b for a, b in zip(found, rates[0], strict=True)),
        )
        for each, found in zip(decodings, rates, strict=True)
    ]


def is_goal(row: Row) -> bool:
    """Whether the goal is about this row: a slower instruction set than the best only shows what the best one buys."""
    return row.kind == SHOULD and row.instruction_set == best_instruction_set()


def is_reached(rows: Sequence[Row]) -> bool:
    """Whether the goal is; not where the kind that it is about was left out."""
    intervals = [row.interval for row in rows if is_goal(row)]
    return bool(intervals) and all(each is not None and each[0] >= GOAL for each in intervals)


def table_of(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """A line for each kind and instruction set."""
    title = f"{options.preset}, groups of {options.group}, {options.threads} threads"
    table = Table("weights", "instructions", "MB", "tokens/s", f"of {FIRST}", "95% interval", title=title)
    for row in rows:
        bounds = row.interval
        table.add_row(
            *(row.kind, row.instruction_set, f"{row.bytes / 1e6:.1f}"),
            *(f"{statistics.median(row.rates):.1f}", f"{row.ratio:.3f}"),
            "-" if bounds is None else f"{bounds[0]:.3f}..{bounds[1]:.3f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
