"""`python -m benchmarks.depth`: how fast a token is far into a text, beside llama.cpp.

Decode steps of one sequence of a preset's shapes after 64, 2,048 and 8,192 tokens, with each kind of cache that
native_decode has, and llama.cpp's Q4_0 with its default one. All engines are resident in one process and take turns at
each depth; figures are medians over the turns, ratios of the same turn. Goal: after 8,192 tokens at least 0.85 of the
speed after 64.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from rich.table import Table

from benchmarks.document import write
from benchmarks.native_batches import Places, written
from benchmarks.native_program import shaped_program
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.cpu import one_cpu_of_each_core
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.program import CacheKind
from optigpu.report import console
from optigpu.vocabulary import OptiGPUError

DEPTHS = (64, 2048, 8192)
STEPS = 16
"""Of a turn at each depth."""
GOAL = 0.85
PAGE = 64
THEIRS = "llama.cpp Q4_0"


@dataclass(frozen=True)
class Row:
    """tokens/s of an engine at a depth, turn by turn."""

    engine: str
    depth: int
    rates: tuple[float, ...]


def main() -> int:
    """Prints the table; 0 where each of our caches reaches the goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.depth", description=__doc__)
    parser.add_argument("--preset", default="llama-3.2-1b", help="a preset of the family llama")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--depths", type=int, nargs="+", default=DEPTHS, help="tokens before, the fewest first"
    )
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    try:
        rows = measured(engines_of(options), options)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    console().print(table_of(rows, options.preset))
    shares = {row.engine: share(rows, row) for row in rows if row.depth == options.depths[-1]}
    if options.output:
        about = {"goal": GOAL, "preset": options.preset, "threads": options.threads, "shares": shares}
        write(options.output, "depth", about | {"rows": [asdict(row) for row in rows]})
    return 0 if all(found >= GOAL for engine, found in shares.items() if engine != THEIRS) else 1


def engines_of(options: argparse.Namespace) -> dict[str, Places]:
    """Each with a place for every depth, filled so far."""
    reference = f"preset:{options.preset}"
    facts = facts_of(parse_reference(reference))
    assert isinstance(facts, ModelFacts)
    length = max(options.depths) + (options.turns + 1) * STEPS
    length = -(-length // PAGE) * PAGE
    made = ours(facts, options.threads, len(options.depths), length)
    if not options.alone:
        made[THEIRS] = theirs(reference, options.threads, len(options.depths), length)
    source = random.Random(0)
    for name, places in made.items():
        for slot, depth in enumerate(options.depths):
            console(stderr=True).print(f"{name}: reading {depth} tokens")
            places.join(slot, [source.randrange(facts.vocabulary) for _ in range(depth)])
    return made


def ours(facts: ModelFacts, threads: int, count: int, length: int) -> dict[str, Places]:
    """native_decode with 4-bit weights in groups of 32, once for each kind of cache."""
    from optigpu.ops.decode.cpu.decoder import CpuDecoder
    from optigpu.techniques.decoding.native_decode.slots import NativeSlots

    program = shaped_program(facts, length)
    return {
        f"native_decode, {kv} cache": NativeSlots(
            CpuDecoder(program, kv, threads=threads, cpus=one_cpu_of_each_core()), count, length, PAGE
        )
        for kv in get_args(CacheKind)
    }


def theirs(reference: str, threads: int, count: int, length: int) -> Places:
    """llama.cpp with the preset's Q4_0 file."""
    from benchmarks.llama_places import LlamaPlaces
    from optigpu.backends.llama_cpp.engine import LLAMA_CPP
    from optigpu.backends.llama_cpp.model import GgufModel

    source = written(reference, threads)
    model = GgufModel(LLAMA_CPP.open(), source.path, source.facts.vocabulary)
    return LlamaPlaces(model, count, length, threads)


def measured(engines: dict[str, Places], options: argparse.Namespace) -> list[Row]:
    """All engines at one depth, then at the next; the first turn warms up."""
    rates: dict[tuple[str, int], list[float]] = {
        (name, depth): [] for name in engines for depth in options.depths
    }
    for turn in range(options.turns + 1):
        for slot, depth in enumerate(options.depths):
            for name, places in engines.items():
                rate = stepped(places, slot)
                if turn:
                    rates[name, depth].append(rate)
    return [Row(name, depth, tuple(found)) for (name, depth), found in rates.items()]


def stepped(places: Places, slot: int) -> float:
    """tokens/s of some steps of one sequence."""
    began = time.perf_counter()
    for _ in range(STEPS):
        places.step([slot])
    return STEPS / (time.perf_counter() - began)


def share(rows: Sequence[Row], row: Row) -> float:
    """Of the speed at the least depth: the median of the turns' ratios."""
    first = next(each for each in rows if each.engine == row.engine)
    return statistics.median(a / b for a, b in zip(row.rates, first.rates, strict=True))


def table_of(rows: Sequence[Row], preset: str) -> Table:
    """A line for each engine and depth."""
    table = Table("engine", "tokens before", "tokens/s", "of the first", "of llama.cpp", title=preset)
    for row in rows:
        them = next((each for each in rows if (each.engine, each.depth) == (THEIRS, row.depth)), None)
        beside = None if them is None else zip(row.rates, them.rates, strict=True)
        table.add_row(
            row.engine,
            f"{row.depth:,}",
            f"{statistics.median(row.rates):.1f}",
            f"{share(rows, row):.2f}",
            "-" if beside is None else f"{statistics.median(a / b for a, b in beside):.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
