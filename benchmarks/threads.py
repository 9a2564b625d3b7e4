"""`python -m benchmarks.threads`: native_decode with 1, 2, 4 and 8 threads, beside the memory and a model of the cost.

Bare decode steps of one sequence, a process for each number of threads, all resident and taking turns; in each turn the
memory is read with as many threads, in an array as large as what a step reads. Weights are 4 bits with calibration
"none", which changes no speed. Figures are medians over the turns, ratios of the same turn. The model is that of
`thread_costs`; its terms are measured here, the time of a meeting by the decoder's own team of threads. Numbers of
threads for which this machine has too few cores are predicted, and not measured.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from benchmarks.document import write
from benchmarks.peers import answering
from benchmarks.thread_costs import (
    Predicted,
    StepWork,
    Terms,
    meets_s,
    memory_s,
    predicted,
    products_s,
    step_s,
)
from optigpu.hardware.cpu import cpu_cores, one_cpu_of_each_core
from optigpu.hardware.numa import node_of_each_cpu
from optigpu.report import console
from optigpu.vocabulary import OptiGPUError

THREADS = (1, 2, 4, 8)
PRESETS = ("gpt2", "llama-3.2-1b")
RATE, BANDWIDTH, PRODUCTS, MEETING = "tokens_per_s", "bytes_per_s", "flops_per_s", "meet_s"
"""What is measured in each turn."""
Samples = Mapping[str, Sequence[float]]
NO_PREDICTION = "Not predicted: what a meeting of threads costs needs two cores."


@dataclass(frozen=True)
class Row:
    """One number of threads. `samples` are those of each turn; the model's seconds are of a step, and of its terms.

    What was not measured has a `reason`, and is `predicted` where that can be.
    """

    threads: int
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    tokens_per_s: float | None = None
    ratio: float | None = None
    read_bytes_per_s: float | None = None
    bytes_per_s: float | None = None
    share: float | None = None
    model_s: dict[str, float] | None = None
    predicted: Predicted | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Study:
    """A preset: what a step does, how it was built, and a row for each number of threads."""

    preset: str
    step: StepWork
    details: dict[str, Any]
    rows: tuple[Row, ...]


def studied(preset: str, threads: Sequence[int], turns: int, new_tokens: int) -> Study:
    """Raises OptiGPUError when a process fails, and where all that is asked for are more threads than cores."""
    from benchmarks.thread_terms import Memory, Products, meet_s

    cpus = one_cpu_of_each_core()
    counts = [count for count in threads if count <= cores()]
    if not counts:
        raise OptiGPUError(
            f"This process may use {cores()} physical cores; ask for as many --threads or fewer."
        )
    with ExitStack() as leave:
        arguments = ("--model", f"preset:{preset}", "--new-tokens", str(new_tokens))
        processes = {
            count: leave.enter_context(
                answering("benchmarks.bare_steps", arguments, f"{preset}, {count} threads", count)
            )
            for count in track(counts, f"packing {preset}", console=console(stderr=True))
        }
        details = processes[counts[0]].details
        step = StepWork(**details.pop("step"))
        memory, products = Memory(step.bytes), Products()

        def sampled(count: int) -> dict[str, float]:
            return {
                RATE: processes[count].rate(),
                BANDWIDTH: memory.bytes_per_s(count),
                PRODUCTS: products.flops_per_s(),
                MEETING: meet_s(cpus[:count]),
            }

        samples = taken_in_turns(counts, turns, sampled)
    details["placement"] = {count: processes[count].details["placement"] for count in counts}
    return Study(preset, step, details, rows_of(step, threads, samples))


def taken_in_turns(
    counts: Sequence[int], turns: int, sampled: Callable[[int], dict[str, float]]
) -> dict[int, dict[str, tuple[float, ...]]]:
    """What each number of threads came to in each turn; the one that begins changes."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for turn in track(range(turns), "taking turns", console=console(stderr=True)):
        first = turn % len(counts)
        for count in (*counts[first:], *counts[:first]):
            found[count].append(sampled(count))
    return {
        count: {name: tuple(each[name] for each in taken) for name in taken[0]}
        for count, taken in found.items()
    }


def cores() -> int:
    """Physical cores for threads of their own."""
    return min(cpu_cores(), len(one_cpu_of_each_core()))


def rows_of(step: StepWork, threads: Sequence[int], samples: Mapping[int, Samples]) -> tuple[Row, ...]:
    """Of those that have samples their medians, of the others what the model says."""
    terms = [_terms(count, samples[count]) for count in sorted(samples)]
    first = samples.get(1)
    known = {each.threads: _measured(step, each, samples[each.threads], first) for each in terms}
    return tuple(known.get(count) or _unmeasured(step, terms, count) for count in threads)


def _terms(threads: int, samples: Samples) -> Terms:
    return Terms(threads, *(statistics.median(samples[name]) for name in (BANDWIDTH, PRODUCTS, MEETING)))


def _measured(step: StepWork, terms: Terms, samples: Samples, first: Samples | None) -> Row:
    rate, rates = statistics.median(samples[RATE]), samples[RATE]
    shares = [step.bytes * a / b for a, b in zip(rates, samples[BANDWIDTH], strict=True)]
    ratios = None if first is None else [a / b for a, b in zip(rates, first[RATE], strict=True)]
    return Row(
        threads=terms.threads,
        samples={name: tuple(values) for name, values in samples.items()},
        tokens_per_s=rate,
        ratio=None if ratios is None else statistics.median(ratios),
        read_bytes_per_s=step.bytes * rate,
        bytes_per_s=terms.bytes_per_s,
        share=statistics.median(shares),
        model_s={
            "step": step_s(step, terms),
            "memory": memory_s(step, terms),
            "products": products_s(step, terms),
            "meetings": meets_s(step, terms),
        },
    )


def _unmeasured(step: StepWork, terms: Sequence[Terms], threads: int) -> Row:
    found = predicted(step, terms, threads)
    reason = (
        f"Not measured: {threads} threads need as many physical cores, and this process may use {cores()}."
    )
    return Row(threads, predicted=found, reason=reason if found else f"{reason} {NO_PREDICTION}")


def table_of(study: Study) -> Table:
    """A line for each number of threads; what is predicted says so."""
    table = Table(
        *("threads", "tokens/s", "to one", "GB/s", "of memory's", "share", "model, tokens/s"),
        "memory, products, meetings (ms)",
        title=f"{study.preset}: {study.step.bytes / 1e6:,.0f} MB and {study.step.meets} meetings a step",
    )
    for row in study.rows:
        table.add_row(str(row.threads), *(_cells(row) if row.model_s else _of_prediction(row)))
    return table


def _cells(row: Row) -> list[str]:
    assert row.model_s is not None
    figures = [
        row.tokens_per_s,
        row.ratio,
        *(_giga(rate) for rate in (row.read_bytes_per_s, row.bytes_per_s)),
    ]
    terms = ", ".join(f"{1000 * row.model_s[name]:.3f}" for name in ("memory", "products", "meetings"))
    numbers = ["-" if figure is None else f"{figure:.2f}" for figure in (*figures, row.share)]
    return [*numbers, f"{1 / row.model_s['step']:.1f}", terms]


def _giga(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9


def _of_prediction(row: Row) -> list[str]:
    found = row.predicted
    text = "-" if found is None else f"predicted: {1 / found.most_s:.1f} to {1 / found.least_s:.1f}"
    return ["not measured", "-", "-", "-", "-", text, "-"]


def main() -> int:
    """Prints a table for each preset."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=__doc__)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    try:
        studies = [
            studied(preset, sorted(options.threads), options.turns, options.new_tokens)
            for preset in options.presets
        ]
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    for study in studies:
        console().print(table_of(study))
    if options.output:
        nodes = sorted(set(node_of_each_cpu().values()))
        about = {"turns": options.turns, "new_tokens": options.new_tokens, "cores": cores(), "nodes": nodes}
        write(options.output, "threads", about | {"studies": [asdict(study) for study in studies]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
