"""The table of kernels as a page and as a document."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
import triton

from optigpu.hardware.catalog import capabilities
from optigpu.report.formats import Column, Grid, markdown
from optigpu.vocabulary import utc_now
from tools.kernels.table import Row

_WORDS = """# Kernels, compiled ahead

Written by `python -m tools.kernel_table`. Every Triton kernel of the package is compiled for each of these compute
capabilities, by Triton and the assembler that it brings, on a machine without a GPU. **Nothing here has run on a GPU**:
these are properties of the machine code, not speeds. An example is a launch as the package makes it for a
model's shapes.

- registers, spilled: 32-bit registers of a thread, and bytes that it stores to memory because it has no more of them.
- shared: bytes of shared memory of a block.
- blocks: how many blocks a multiprocessor has room for at once.
- in flight: bytes that the threads of those blocks ask global memory for before they wait for any of them: a thread's
  loads in a turn of that of its innermost loops which has most (in all, without a loop) times the threads. To keep
  memory busy, a card needs about its bandwidth times its latency, divided by its multiprocessors: with 0.8 us assumed,
  6 kB on a T4, 15 kB on an A100, 29 kB on an H200.

A test compiles again what is for sm_90, whose figures must be the same, and whatever has changed since, which a digest
of kernel, launch and compiler tells. It fails if a kernel does not compile, spills more than its example allows, or
needs more than the capability's limits, which are in `optigpu/hardware/catalog.toml`:
"""


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The table as JSON, with what compiled it."""
    return {
        "benchmark": "kernels",
        "at": utc_now().date().isoformat(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }


def page(rows: Sequence[Row]) -> str:
    """The table as Markdown, a table for each kernel."""
    by_kernel = sorted(rows, key=lambda row: (row.file, row.kernel))  # stable: examples keep their order
    groups = groupby(by_kernel, key=lambda row: (row.file, row.kernel))
    parts = [_of_kernel(*kernel, list(group)) for kernel, group in groups]
    versions = f"Compiled {utc_now().date().isoformat()} with Triton {triton.__version__}, torch {torch.__version__}."
    return "\n".join([_WORDS, markdown(_limits()), versions, "", *parts]).rstrip("\n") + "\n"


def _limits() -> Grid:
    headings = ("capability", "cards", "registers", "shared of a block", "shared", "threads", "blocks")
    cells = (
        (
            each.name,
            ", ".join(each.cards),
            *map(
                str,
                (each.registers, each.shared_bytes_per_block, each.shared_bytes, each.threads, each.blocks),
            ),
        )
        for each in capabilities()
    )
    return Grid("", tuple(Column(name, right=index > 1) for index, name in enumerate(headings)), tuple(cells))


def _of_kernel(file: str, kernel: str, rows: Iterable[Row]) -> str:
    headings = ("example", "capability", "registers", "spilled", "shared", "threads", "blocks", "in flight")
    columns = tuple(Column(name, right=index > 1) for index, name in enumerate(headings))
    by_example = sorted(rows, key=lambda row: row.example)
    return f"## {kernel}\n\n`{file}`\n\n" + markdown(Grid("", columns, tuple(map(_cells, by_example))))


def _cells(row: Row) -> tuple[str, ...]:
    if row.reason is not None:
        return row.example, row.capability, f"not compiled: {row.reason}", "", "", "", "", ""
    figures = (
        row.registers,
        row.spilled_bytes,
        row.shared_bytes,
        row.threads,
        row.blocks,
        row.bytes_in_flight,
    )
    return row.example, row.capability, *map(str, figures)
