"""`python -m benchmarks.layers`: what the layers reach, beside the reference figures of the same run.

Tables: `decode` (GPT-2 at batch 1 on this CPU, stacks and peers), `hybrid` (int8_hybrid over model sizes), `gpu` (what
needs an NVIDIA GPU). Each line's ratio is the median over turns against the first line of its group, whose process
stood ready side by side with it.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from benchmarks import gpu_layers
from benchmarks.document import write
from benchmarks.peers import PEERS, PUBLISHED, Peer
from benchmarks.stacks import LLAMA_CPP, Case, Stack, named
from benchmarks.turns import Figures, measure
from optigpu.report import console

SHAPE = (32, 64)
"""Prompt tokens and new tokens."""
AT_ONCE = 7
"""Processes that are resident together with the reference: their memory must fit."""


def decode_stacks() -> list[Stack]:
    """Our stacks of the table `decode`, the baseline left out."""
    alone = ("bf16", "int8_weight_only", "int8_dynamic", "int4_weight_only", "torch_compile")
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
    stacks = [Stack(name, named(name)) for name in alone]
    return stacks + [
        Stack(" + ".join((*names, "torch_compile")), named(*names, compiled=True)) for names in compiled
    ]


def decode_table(preset: str, turns: int) -> list[Figures]:
    """Peers and stacks over Hugging Face eager fp32."""
    reference, *peers = PEERS
    baseline = Stack("our baseline (no technique)")
    return in_groups(reference, [*peers, *LLAMA_CPP, baseline, *decode_stacks()], preset, turns)


def hybrid_table(preset: str, turns: int) -> list[Figures]:
    """int8_hybrid with eight and with four bits, alone and compiled, over the fp32 baseline."""
    subjects = [
        Stack(f"int8_hybrid bits={bits}{' + torch_compile' * compiled}", stack)
        for bits in (8, 4)
        for compiled in (False, True)
        for stack in [named("int8_hybrid", compiled=compiled, bits=bits)]
    ]
    return in_groups(Stack("fp32 baseline"), subjects, preset, turns)


def in_groups(
    reference: Stack | Peer, subjects: Sequence[Stack | Peer], preset: str, turns: int
) -> list[Figures]:
    """Groups of AT_ONCE, each with the reference in it; its figures are those of the first group."""
    found: list[Figures] = []
    for start in range(0, len(subjects), AT_ONCE):
        group = measure([reference, *subjects[start : start + AT_ONCE]], Case(preset, *SHAPE), turns)
        found += group if not found else group[1:]
    return found


def goals(tables: dict[str, list[Figures]]) -> list[tuple[str, bool]]:
    """The goals of the measured tables, with the figures and whether they were reached."""
    found: list[tuple[str, bool]] = []
    if "decode gpt2" in tables:
        ratios = {figures.name: figures.ratio for figures in tables["decode gpt2"] if figures.ratio}
        bf16 = max(
            (name for name in ratios if name.startswith("bf16 +")),
            key=lambda name: ratios[name],
            default=None,
        )
        if bf16:
            found.append(
                (f"the best bf16 stack at least 6x fp32: {bf16} {ratios[bf16]:.2f}x", ratios[bf16] >= 6)
            )
        pair = [ratios.get(f"{name} + torch_compile") for name in ("int4_weight_only", "int8_weight_only")]
        if all(pair):
            four, eight = (float(ratio or 0) for ratio in pair)
            found.append((f"int4_weight_only beats int8: {four:.2f}x against {eight:.2f}x", four > eight))
    for name, table in tables.items():
        if name.startswith("hybrid "):
            found += hybrid_goals(name.removeprefix("hybrid "), table)
    return found


def hybrid_goals(preset: str, table: Sequence[Figures]) -> Iterable[tuple[str, bool]]:
    """Bytes at most 26% (16% with four bits) of fp32's, and at least 1.5 times its speed."""
    whole = table[0].weight_bytes
    for figures in table[1:]:
        if figures.ratio is None or not whole or not figures.weight_bytes:
            yield f"{preset}, {figures.name}: not measured", False
            continue
        share, most = figures.weight_bytes / whole, 0.16 if "bits=4" in figures.name else 0.26
        sizes = f"{share:.1%} of the bytes (at most {most:.0%})"
        yield (
            f"{preset}, {figures.name}: {sizes}, {figures.ratio:.2f}x (at least 1.5x)",
            share <= most and figures.ratio >= 1.5,
        )


def shown(title: str, table: Sequence[Figures], published: dict[str, str]) -> Table:
    """The figures as a table for a person."""
    grid = Table(title=title, title_justify="left")
    for heading in ("what", "tokens/s", "against the first", "lowest..highest", "weights"):
        grid.add_column(heading, justify="left" if heading == "what" else "right")
    whole = table[0].weight_bytes
    for figures in table:
        if figures.reason:
            grid.add_row(figures.name, "", "", "", figures.reason)
            continue
        share = f" ({figures.weight_bytes / whole:.1%})" if whole and figures.weight_bytes else ""
        grid.add_row(
            figures.name,
            f"{figures.rate:.1f}",
            f"{figures.ratio:.2f}x",
            f"{min(figures.ratios):.2f}..{max(figures.ratios):.2f}",
            f"{(figures.weight_bytes or 0) / 1e6:.0f} MB{share}",
        )
    for name, text in published.items():
        grid.add_row(name, "", "", "", text, style="dim")
    return grid


def main() -> int:
    """Measures the tables that were asked for; the exit status is 0 when every goal was reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=__doc__)
    parser.add_argument(
        "--tables", nargs="+", default=["decode", "hybrid", "gpu"], choices=["decode", "hybrid", "gpu"]
    )
    parser.add_argument(
        "--sizes", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED), help="of the table hybrid"
    )
    parser.add_argument("--turns", type=int, default=9, help="requests of each subject")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    wanted: list[tuple[str, str, Callable[[str, int], list[Figures]]]] = []
    if "decode" in options.tables:
        wanted.append(("decode", "gpt2", decode_table))
    if "hybrid" in options.tables:
        wanted += [("hybrid", size, hybrid_table) for size in options.sizes]
    tables: dict[str, list[Figures]] = {}
    for kind, preset, make in wanted:
        table = tables[f"{kind} {preset}"] = make(preset, options.turns)
        console().print(
            shown(
                f"{kind}: preset:{preset}, batch 1, {SHAPE[0]} + {SHAPE[1]} tokens",
                table,
                _published(kind, preset),
            )
        )
    gpu = gpu_layers.measured() if "gpu" in options.tables else None
    reached = goals(tables) + (gpu.goals if gpu else [])
    for text, met in reached:
        console().print(f"{'reached' if met else 'NOT reached'}: {text}", markup=False)
    if options.output:
        figures = {
            name: [asdict(line) | {"ratio": line.ratio, "rate": line.rate} for line in table]
            for name, table in tables.items()
        }
        goals_reached = [{"goal": text, "reached": met} for text, met in reached]
        write(
            options.output,
            "layers",
            {"shape": SHAPE, "tables": figures, "goals": goals_reached, "gpu": gpu.document if gpu else None},
        )
    return 0 if all(met for _, met in reached) else 1


def _published(kind: str, preset: str) -> dict[str, str]:
    if kind != "hybrid":
        return {}
    share, speed = PUBLISHED[preset]
    return {"gpu-poor, published and not measured here": f"{share:.0%} of the bytes, {speed:.2f}x"}


if __name__ == "__main__":
    sys.exit(main())
