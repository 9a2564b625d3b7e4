"""`python -m benchmarks.native_batches`: sequences of different lengths that decode together, beside llama.cpp.

Both engines are resident in one process and take turns. `steps` are decode steps of 1, 4, 8 and 16 sequences whose
prompts differ in length; `served` is a closed load: 8 clients, each of whose requests has a prompt and an answer of
another length, prefills included, with continuous batching. llama.cpp runs Q4_0 through its C interface, as its server
does, without HTTP. Where llama-server itself is there, the same load is sent to it as 8 streams at once, over HTTP.
Figures are medians over the turns, ratios of the same turn.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.table import Table

from benchmarks.document import write
from benchmarks.llama_server import plain_words, program, started, with_vocabulary
from benchmarks.native_program import shaped_program
from optigpu.backends.base import Order
from optigpu.backends.endpoint.client import Completions, Server
from optigpu.backends.llama_cpp.engine import LLAMA_CPP
from optigpu.backends.llama_cpp.source import Source, source_of
from optigpu.documents.endpoints import parse_endpoint
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware import probe
from optigpu.hardware.cpu import one_cpu_of_each_core
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.report import console
from optigpu.techniques.quantization.gguf import Gguf
from optigpu.vocabulary import DeviceKind, OptiGPUError
from optigpu.workloads.generate import Generate

BATCHES = (1, 4, 8, 16)
LENGTH = 512
"""Tokens of a place."""
STEPS = 24
CLIENTS = 8
PROMPTS, ANSWERS = (16, 160), (32, 96)
"""The least and the most tokens of a request of the load."""
GOAL = 1.5
"""Of the load's tokens/s over llama.cpp's, and over llama-server's."""
SERVER = "served, llama-server"
Request = tuple[list[int], int]
"""A prompt, and how many tokens are asked for."""
Rate = Callable[[], float]
"""tokens/s of one more turn."""


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


def requests(vocabulary: int, count: int) -> list[Request]:
    """So many of the load, always the same."""
    source = random.Random(0)
    return [
        ([source.randrange(1, vocabulary) for _ in range(source.randint(*PROMPTS))], source.randint(*ANSWERS))
        for _ in range(count)
    ]


def served(made: Made, load: Sequence[Request]) -> float:
    """tokens/s of the load, from the first request to the last token."""
    places, waiting = made(CLIENTS), deque(load)
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


def asked(endpoint: str, load: Sequence[Request]) -> float:
    """tokens/s of the same load at a server: each of the clients sends its next request when its last has ended."""
    found = parse_endpoint(endpoint)
    server = Server(found.url, str(found.model), options=lambda _: {"ignore_eos": True})
    return asyncio.run(_asked(server, iter(load)))


async def _asked(server: Server, load: Iterator[Request]) -> float:
    async with Completions(server) as completions:

        async def client() -> int:
            tokens = 0
            for prompt, answer in load:
                streamed = await completions.stream(prompt, answer)
                if streamed.error is not None:
                    raise OptiGPUError(streamed.error)
                tokens += streamed.tokens
            return tokens

        began = time.perf_counter()
        tokens = await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return sum(tokens) / (time.perf_counter() - began)


def ours(facts: ModelFacts, threads: int) -> Made:
    """native_decode with 4-bit weights in groups of 32."""
    from optigpu.ops.decode.cpu.decoder import CpuDecoder
    from optigpu.techniques.decoding.native_decode.slots import NativeSlots

    decoder = CpuDecoder(shaped_program(facts, 2048), threads=threads, cpus=one_cpu_of_each_core())
    return lambda count: NativeSlots(decoder, count, LENGTH, 64)


def written(reference: str, threads: int) -> Source:
    """The preset's Q4_0 file, which is written where it is not kept."""
    order = Order(
        *(reference, (Gguf(type="Q4_0"),), Generate(), DeviceKind.CPU, 0, threads),
        *(Path(tempfile.mkdtemp()), probe()),
    )
    return source_of(order, LLAMA_CPP, LLAMA_CPP.open(), print)


def theirs(source: Source, threads: int) -> Made:
    """llama.cpp with a file."""
    from benchmarks.llama_places import LlamaPlaces
    from optigpu.backends.llama_cpp.model import GgufModel

    model = GgufModel(LLAMA_CPP.open(), source.path, source.facts.vocabulary)
    return lambda count: LlamaPlaces(model, count, LENGTH, threads)


def measured(cases: Mapping[str, tuple[Rate, Rate]], turns: int) -> list[Row]:
    """The engines take turns within each case, and the one that begins changes."""
    rates: dict[str, tuple[list[float], list[float]]] = {case: ([], []) for case in cases}
    for turn in range(turns):
        for case, both in cases.items():
            for which in (0, 1) if turn % 2 else (1, 0):
                rates[case][which].append(both[which]())
            mine, others = (sides[-1] for sides in rates[case])
            console(stderr=True).print(f"turn {turn + 1}, {case}: {mine:.1f} and {others:.1f} tokens/s")
    return [Row(case, tuple(mine), tuple(others)) for case, (mine, others) in rates.items()]


def cases_of(options: argparse.Namespace, leave: ExitStack) -> dict[str, tuple[Rate, Rate]]:
    """Those that were asked for and can be measured here; `leave` ends the server."""
    reference = f"preset:{options.preset}"
    facts = facts_of(parse_reference(reference))
    assert facts is not None
    vocabulary, source = facts.vocabulary, written(reference, options.threads)
    both = ours(facts, options.threads), theirs(source, options.threads)
    cases: dict[str, tuple[Rate, Rate]] = {
        f"steps of {count}": (
            partial(stepped, both[0], count, vocabulary),
            partial(stepped, both[1], count, vocabulary),
        )
        for count in BATCHES
    }
    load = requests(vocabulary, options.requests)
    cases["served"] = (partial(served, both[0], load), partial(served, both[1], load))
    if program():
        folder = Path(leave.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "model.gguf"
        with_vocabulary(source.path, file, plain_words(vocabulary))
        endpoint = leave.enter_context(started(file, folder, CLIENTS, LENGTH, options.threads))
        cases[SERVER] = (partial(served, both[0], load), partial(asked, endpoint, load))
    return {case: rates for case, rates in cases.items() if case in (options.cases or cases)}


def main() -> int:
    """Prints the table; 0 where the load reaches the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama-3.2-1b", help="a preset of the family llama")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24, help="of each turn of the load")
    parser.add_argument("--cases", nargs="+", default=[], help='such as "served"; all without it')
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    with ExitStack() as leave:
        rows = measured(cases_of(options, leave), options.turns)
    table = Table(
        "case", "native_decode, tokens/s", "llama.cpp Q4_0, tokens/s", "ratio", title=options.preset
    )
    for row in rows:
        medians = (f"{statistics.median(rates):.1f}" for rates in (row.ours, row.theirs))
        table.add_row(row.case, *medians, f"{row.ratio:.2f}")
    console().print(table)
    if options.json:
        figures = [asdict(row) | {"ratio": row.ratio} for row in rows]
        about = {"goal": GOAL, "threads": options.threads, "requests": options.requests}
        write(options.json, "native_batches", about | {"rows": figures})
    loads = [row for row in rows if row.case.startswith("served")]
    return 0 if all(row.ratio >= GOAL for row in loads) else 1


if __name__ == "__main__":
    sys.exit(main())
