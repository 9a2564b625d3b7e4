"""How much of a program's weights would lie on the node of the thread that reads them, on machines of several nodes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from optigpu.ops.decode.cpu.arena import HUGE_PAGE_BYTES
from optigpu.ops.decode.cpu.placement import Span, pages_of, read_by_threads
from optigpu.ops.decode.program import Program

MACHINES = ((2, 1), (2, 4), (4, 2))
"""Nodes, and threads on each of them."""
PAGES = (4096, HUGE_PAGE_BYTES)


def shares_at_home(program: Program) -> list[dict[str, Any]]:
    """Computed from the plan, not measured: the share of bytes at home, for each machine and size of a page."""
    found = []
    for nodes, threads in MACHINES:
        reads = read_by_threads(program, [node for node in range(nodes) for _ in range(threads)])
        shares = {str(page): share_at_home(reads, pages_of(reads, page)) for page in PAGES}
        found.append({"nodes": nodes, "threads_of_node": threads, "share_by_page_bytes": shares})
    return found


def share_at_home(reads: Sequence[Span], pages: Sequence[Span]) -> float:
    """Of the bytes of `reads`, those in pages of the node that reads them. `pages`, in order, hold all of them."""
    edges = sorted({*(edge for span in (*reads, *pages) for edge in (span.begin, span.end))})
    places, readers = _nodes(edges, pages), _nodes(edges, sorted(reads))
    sizes = [end - begin for begin, end in pairwise(edges)]
    home = sum(
        size
        for size, place, reader in zip(sizes, places, readers, strict=True)
        if place == reader is not None
    )
    return home / sum(read.end - read.begin for read in reads)


def _nodes(edges: Sequence[int], spans: Sequence[Span]) -> list[int | None]:
    """The node of each stretch between two edges; spans are in order and do not overlap."""
    left, found = iter(spans), list[int | None]()
    span = next(left, None)
    for begin, _ in pairwise(edges):
        while span is not None and span.end <= begin:
            span = next(left, None)
        found.append(span.node if span is not None and span.begin <= begin else None)
    return found
