"""`python -m benchmarks.native_batches`: sequences of different lengths that decode together, beside llama.cpp.

Both engines are resident in one process and take turns. `steps` are decode steps of 1, 4, 8 and 16 sequences whose
prompts differ in length; `served` is a closed load: 8 clients, each of whose requests has a prompt and an answer of
another length, prefills included, with continuous batching. llama.cpp runs Q4_0 through its C interface, as its server
does, without HTTP. Figures are medians over the turns, ratios of the same turn.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.table import Table

from benchmarks.document import write
from benchmarks.native_program import shaped_program
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware import probe
from optigpu.hardware.cpu import one_cpu_of_each_core
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.report import console
from optigpu.techniques.quantization.gguf import Gguf
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.generate import Generate

BATCHES = (1, 4, 8, 16)
LENGTH = 512
"""Tokens of a place."""
STEPS = 24
CLIENTS, REQUESTS = 8, 24
PROMPTS, ANSWERS = (16, 160), (32, 96)
"""The least and the most tokens of a request of the load."""
GOAL = 1.5
"""Of the load's tokens/s over llama.cpp's."""


class Places(Protocol):
    """What both engines have: see optigpu.backends.serving."""

    def join(self, slot: int, prompt: Sequence[int]) -> int: ...

    def step(self, slots: Sequence[int]) -> Sequence[int]: ...

    def leave(self, slot: int) -> None: ...

    def close(self) -> None: ...


Made = Callable[[int], Places]
"""Makes so many places."""


@dataclass(frozen=True)
class Row:
    """A case's rates in tokens/s, turn by turn."""

    case: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median of the turns' ratios."""
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))


def stepped(made: Made, count: int, vocabulary: int) -> float:
    """tokens/s of decode steps alone, of sequences whose lengths differ."""
    source, places = random.Random(count), made(count)
    for slot in range(count):
        places.join(slot, [source.randrange(vocabulary) for _ in range(16 + 24 * slot)])
    places.step(range(count))
    began = time.perf_counter()
    for _ in range(STEPS):
        places.step(range(count))
    seconds = time.perf_counter() - began
    places.close()
    return count * STEPS / seconds


def served(made: Made, vocabulary: int) -> float:
    """tokens/s of the load, from the first request to the last token."""
    source, places = random.Random(0), made(CLIENTS)
    waiting = deque(
        ([source.randrange(vocabulary) for _ in range(source.randint(*PROMPTS))], source.randint(*ANSWERS))
        for _ in range(REQUESTS)
    )
    tokens, left = sum(answer for _, answer in waiting), dict[int, int]()
    began = time.perf_counter()
    while waiting or left:
        for slot in [slot for slot in range(CLIENTS) if slot not in left][: len(waiting)]:
            prompt, answer = waiting.popleft()
            places.join(slot, prompt)
            left[slot] = answer - 1
        places.step(list(left))
        for slot in list(left):
            left[slot] -= 1
            if not left[slot]:
                del left[slot]
                places.leave(slot)
    seconds = time.perf_counter() - began
    places.close()
    return tokens / seconds


def ours(facts: ModelFacts, threads: int) -> Made:
    """native_decode with 4-bit weights in groups of 32."""
    from optigpu.ops.decode.cpu.decoder import CpuDecoder
    from optigpu.techniques.decoding.native_decode.slots import NativeSlots

    decoder = CpuDecoder(shaped_program(facts, 2048), threads=threads, cpus=one_cpu_of_each_core())
    return lambda count: NativeSlots(decoder, count, LENGTH, 64)


def theirs(reference: str, threads: int) -> Made:
    """llama.cpp with the preset's Q4_0 file, which is written where it is not kept."""
    from benchmarks.llama_places import LlamaPlaces
    from optigpu.backends.base import Order
    from optigpu.backends.llama_cpp.engine import LLAMA_CPP
    from optigpu.backends.llama_cpp.model import GgufModel
    from optigpu.backends.llama_cpp.source import source_of

    order = Order(
        *(reference, (Gguf(type="Q4_0"),), Generate(), DeviceKind.CPU, 0, threads),
        *(Path(tempfile.mkdtemp()), probe()),
    )
    library = LLAMA_CPP.open()
    source = source_of(order, LLAMA_CPP, library, print)
    model = GgufModel(library, source.path, source.facts.vocabulary)
    return lambda count: LlamaPlaces(model, count, LENGTH, threads)


def measured(cases: dict[str, Callable[[Made], float]], both: tuple[Made, Made], turns: int) -> list[Row]:
    """The engines take turns within each case, and the one that begins changes."""
    rates: dict[str, tuple[list[float], list[float]]] = {case: ([], []) for case in cases}
    for turn in range(turns):
        for case, run in cases.items():
            for which in (0, 1) if turn % 2 else (1, 0):
                rates[case][which].append(run(both[which]))
    return [Row(case, tuple(mine), tuple(others)) for case, (mine, others) in rates.items()]


def main() -> int:
    """Prints the table; 0 where the load reaches the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama-3.2-1b", help="a preset of the family llama")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    reference = f"preset:{options.preset}"
    facts = facts_of(parse_reference(reference))
    assert facts is not None
    vocabulary = facts.vocabulary
    cases: dict[str, Callable[[Made], float]] = {
        f"steps of {count}": partial(stepped, count=count, vocabulary=vocabulary) for count in BATCHES
    }
    cases["served"] = partial(served, vocabulary=vocabulary)
    both = ours(facts, options.threads), theirs(reference, options.threads)
    rows = measured(cases, both, options.turns)
    table = Table("case", "native_decode, tokens/s", "llama.cpp Q4_0, tokens/s", "ratio", title=reference)
    for row in rows:
        medians = (f"{statistics.median(rates):.1f}" for rates in (row.ours, row.theirs))
        table.add_row(row.case, *medians, f"{row.ratio:.2f}")
    console().print(table)
    if options.json:
        figures = [asdict(row) | {"ratio": row.ratio} for row in rows]
        write(options.json, "native_batches", {"goal": GOAL, "threads": options.threads, "rows": figures})
    return 0 if rows[-1].ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
