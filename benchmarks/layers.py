"""`python -m benchmarks.layers`: what the layers reach, beside the reference figures of the same run.

Tables: `decode` (GPT-2 at batch 1 on this CPU, stacks and peers), `hybrid` (int8_hybrid over model sizes), `gpu` (what
needs an NVIDIA GPU). Each table's jobs have fp32 in them, whose processes take turns with the others: a ratio is one of
pairs of processes that were resident together, with its 95% interval.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import gpu_layers
from benchmarks.document import say, write
from benchmarks.jobs import Line, grid_of, measured
from benchmarks.stacks import (
    BF16,
    DYNAMIC_INT8,
    FP32,
    LLAMA_CPP,
    NF4,
    PUBLISHED,
    Case,
    Stack,
    measure_of,
    named,
    published,
)
from optigpu.report.formats import console, terminal

SHAPE = (32, 64)
"""Prompt tokens and new tokens."""
AT_ONCE = 7
"""Processes that are resident together with the reference: their memory must fit."""
BUDGET_S = 1800.0
"""How long the jobs of a table may take together; what is whole by then is kept."""


def decode_stacks() -> list[Stack]:
    """What the table `decode` has beside fp32; bf16 and int8_dynamic stand with the peers."""
    compiled = (
        ("bf16",),
        ("int8_weight_only",),
        ("bf16", "int8_weight_only"),
        ("int8_dynamic",),
        ("int4_weight_only",),
        ("bf16", "int4_weight_only"),
        ("fused_layernorm", "fused_gelu", "int4_weight_only"),
        ("bf16", "fused_layernorm", "fused_gelu", "int4_weight_only"),
    )
    return [
        *(BF16, DYNAMIC_INT8, NF4, *LLAMA_CPP),
        *(Stack(name, named(name)) for name in ("int8_weight_only", "int4_weight_only", "torch_compile")),
        *(Stack(" + ".join((*names, "torch_compile")), named(*names, compiled=True)) for names in compiled),
    ]


def hybrid_stacks() -> list[Stack]:
    """int8_hybrid with eight and with four bits, alone and compiled."""
    return [
        Stack(
            f"int8_hybrid bits={bits}{' + torch_compile' * compiled}",
            named("int8_hybrid", compiled=compiled, bits=bits),
        )
        for bits in (8, 4)
        for compiled in (False, True)
    ]


def goals(tables: dict[str, list[Line]]) -> Iterator[tuple[str, bool]]:
    """The goals of the measured tables, with the figures and whether they were reached."""
    for name, table in tables.items():
        kind, preset = name.split()
        yield from hybrid_goals(preset, table) if kind == "hybrid" else decode_goals(table)


def decode_goals(table: Sequence[Line]) -> Iterator[tuple[str, bool]]:
    """The best bf16 stack at least 6 times as fast as fp32, and four bits faster than eight; of what was measured."""
    ratios = {line.name: line.ratio for line in table if line.ratio}
    bf16 = [(ratio, name) for name, ratio in ratios.items() if name.startswith("bf16 +")]
    if bf16:
        ratio, name = max(bf16)
        yield f"the best bf16 stack at least 6x fp32: {name} {ratio:.2f}x", ratio >= 6
    four, eight = (ratios.get(f"{name}_weight_only + torch_compile") for name in ("int4", "int8"))
    if four and eight:
        yield f"int4_weight_only beats int8: {four:.2f}x against {eight:.2f}x", four > eight


def hybrid_goals(preset: str, table: Sequence[Line]) -> Iterator[tuple[str, bool]]:
    """Bytes at most 26% (16% with four bits) of fp32's, and at least 1.5 times its speed."""
    whole = table[0].weight_bytes
    for line in table[1:]:
        if line.ratio is None or not whole or not line.weight_bytes:
            yield f"{preset}, {line.name}: not measured", False
            continue
        share, most = line.weight_bytes / whole, 0.16 if "bits=4" in line.name else 0.26
        sizes = f"{share:.1%} of the bytes (at most {most:.0%})"
        yield (
            f"{preset}, {line.name}: {sizes}, {line.ratio:.2f}x (at least 1.5x)",
            share <= most and line.ratio >= 1.5,
        )


def main() -> int:
    """Measures the tables that were asked for; the exit status is 0 when every goal was reached."""
    options = _options()
    measure = measure_of(options.replicates, options.seconds)
    wanted = [("decode", "gpt2", decode_stacks())] if "decode" in options.tables else []
    if "hybrid" in options.tables:
        wanted += [("hybrid", size, hybrid_stacks()) for size in options.sizes]
    tables: dict[str, list[Line]] = {}
    for kind, preset, stacks in wanted:
        case = Case(f"preset:{preset}", *SHAPE)
        found = measured([case], [FP32], stacks, AT_ONCE, BUDGET_S, measure)
        lines = tables[f"{kind} {preset}"] = found.lines[case.name]
        show(f"{kind}: {case.model}", lines, published(case.model) if kind == "hybrid" else {})
    gpu = gpu_layers.measured() if "gpu" in options.tables else None
    reached = [*goals(tables), *(gpu.goals if gpu else [])]
    status = say(reached)
    if options.output:
        figures = {
            "shape": SHAPE,
            "tables": {name: [asdict(line) for line in table] for name, table in tables.items()},
            "goals": [{"goal": text, "reached": met} for text, met in reached],
            "gpu": gpu.document if gpu else None,
        }
        write(options.output, "layers", figures)
    return status


def show(title: str, lines: Sequence[Line], published: dict[str, str]) -> None:
    """Prints a table."""
    whole = lines[0].weight_bytes
    shares = {line.name: f"{line.weight_bytes / whole:.1%}" for line in lines if whole and line.weight_bytes}
    console().print(f"{title}, batch 1, {SHAPE[0]} + {SHAPE[1]} tokens", markup=False)
    rows = [asdict(line) for line in lines]
    console().print(terminal(grid_of(rows, "of the bytes", shares, published)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=__doc__)
    kinds = ["decode", "hybrid", "gpu"]
    parser.add_argument("--tables", nargs="+", default=kinds, choices=kinds)
    parser.add_argument(
        "--sizes", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED), help="of the table hybrid"
    )
    parser.add_argument("--replicates", type=int, default=3, help="processes of each stack, as time allows")
    parser.add_argument(
        "--seconds", type=float, default=2, help="the least time that each process is measured"
    )
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
