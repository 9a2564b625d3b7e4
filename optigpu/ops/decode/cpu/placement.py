"""Packed weights on the memory nodes of the threads that read them, on machines with several nodes.

Threads begin each product with the same blocks of its matrices every time (shares.h). Pages are moved once, when the
decoder is made, and nothing that they hold changes.
"""

import ctypes
import errno
import mmap
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from optigpu.ops.decode.cpu.arena import HUGE_PAGE_BYTES
from optigpu.ops.decode.program import Matrix, Mlp, Program

MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
"""The system call's number by machine: the C library has no function for it."""
_MOVE_OWN = 2
"""MPOL_MF_MOVE of linux/mempolicy.h: pages that this process alone has mapped."""
_OWN_PROCESS = 0
_SMAPS = Path("/proc/self/smaps")


class Span(NamedTuple):
    """The bytes [begin, end) of memory, and the node whose threads read them, or where they are to lie."""

    begin: int
    end: int
    node: int


class Shared(NamedTuple):
    """A matrix of a product that threads share: its blocks are the product's from `first` on, of `blocks` in all."""

    matrix: Matrix
    first: int
    blocks: int


@dataclass(frozen=True)
class Placement:
    """How many pages of the system were to lie on chosen nodes, and how many do; `reason` says why none was moved."""

    pages: int
    there: int
    reason: str | None = None

    def facts(self) -> dict[str, int | str]:
        """What a result says of it."""
        counts: dict[str, int | str] = {
            "weight_pages": self.pages,
            "weight_pages_on_chosen_nodes": self.there,
        }
        return counts | ({} if self.reason is None else {"weight_pages_not_moved": self.reason})


def chosen_cpus(threads: int, cpus: Sequence[int], nodes: Mapping[int, int]) -> list[int]:
    """The first CPUs, one for each thread, those of a node one after the other; none where there are too few."""
    return sorted(cpus[:threads], key=lambda cpu: nodes.get(cpu, -1)) if len(cpus) >= threads else []


def place(program: Program, cpus: Sequence[int], nodes: Mapping[int, int]) -> Placement | None:
    """Moves the pages of a program's matrices to the nodes of the threads that read them.

    `cpus` are those that the threads are pinned to, `nodes` the node of each CPU. None where there is no choice: on a
    machine with one node, and for threads that are not pinned.
    """
    if len(set(nodes.values())) < 2 or len(cpus) < 2:
        return None
    reads = read_by_threads(program, [nodes.get(cpu) for cpu in cpus])
    return moved(planned(reads, huge_mappings(_SMAPS.read_text()))) if reads else None


def shared_matrices(program: Program) -> Iterator[Shared]:
    """The matrices of all products of a step, as engine.h multiplies them."""
    for block in program.blocks:
        yield from _joined(block.qkv)
        mlp = block.mlp
        # Which experts a step reads is not known before. Gate and up have the same blocks.
        dense = (mlp.gate, mlp.up, mlp.down) if isinstance(mlp, Mlp) else ()
        for matrix in (block.output, *dense):
            yield from _joined(() if matrix is None else (matrix,))
    yield from _joined((program.head,))
    if program.head.finer is not None:
        yield from _joined((program.head.finer.matrix,))


def read_by_threads(program: Program, nodes: Sequence[int | None]) -> list[Span]:
    """What each thread reads of the matrices, without biases; `nodes` has each thread's, None where it has none."""
    found = []
    for matrix, first, blocks in shared_matrices(program):
        own = matrix.numbers.shape[0]
        for thread, node in enumerate(nodes):
            begin, end = (min(max(blocks * id // len(nodes) - first, 0), own) for id in (thread, thread + 1))
            if node is None or begin == end:
                continue
            for tensor in (matrix.numbers, matrix.scale, matrix.unit):
                if tensor is not None:
                    address, size = tensor.data_ptr(), tensor.nbytes // own
                    found.append(Span(address + begin * size, address + end * size, node))
    return found


def planned(reads: Iterable[Span], huge: Sequence[range]) -> list[Span]:
    """Whole pages, each for the node that reads the most of it; pages of the addresses `huge` are huge ones."""
    sizes: dict[int, list[Span]] = {HUGE_PAGE_BYTES: [], mmap.PAGESIZE: []}
    for read in reads:
        is_huge = any(read.begin in each for each in huge)
        sizes[HUGE_PAGE_BYTES if is_huge else mmap.PAGESIZE].append(read)
    return [span for page, its in sizes.items() for span in pages_of(its, page)]


def pages_of(reads: Iterable[Span], page: int) -> list[Span]:
    """The pages of so many bytes that hold what is read, in order, each for the node that reads the most of it.

    Of nodes that read as much the first. Neighbouring pages of a node are one span.
    """
    whole: set[Span] = set()
    parts: dict[int, Counter[int]] = defaultdict(Counter)
    for begin, end, node in reads:
        first, last = -(-begin // page) * page, end // page * page
        if first > last:  # within a page
            parts[last][node] += end - begin
            continue
        parts[first - page][node] += first - begin
        parts[last][node] += end - last
        if first < last:
            whole.add(Span(first, last, node))
    for address, shares in parts.items():
        node = max(sorted(shares), key=lambda each: shares[each])
        if shares[node]:
            whole.add(Span(address, address + page, node))
    found: list[Span] = []
    for span in sorted(whole):
        if found and (found[-1].end, found[-1].node) == (span.begin, span.node):
            span = Span(found.pop().begin, span.end, span.node)
        found.append(span)
    return found


def huge_mappings(smaps: str) -> list[range]:
    """The addresses of each mapping of this process that has huge pages, by what /proc/self/smaps says."""
    found, mapping = [], range(0)
    for line in smaps.splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            mapping = range(int(bounds[1], 16), int(bounds[2], 16))
        elif line.startswith("AnonHugePages:") and int(line.split()[1]):
            found.append(mapping)
    return found


def moved(spans: Sequence[Span], number: int | None = MOVE_PAGES.get(platform.machine())) -> Placement:
    """Moves pages to their nodes, and counts those that lie there. Where the kernel refuses, they stay where they are.

    `number` is that of the system call.
    """
    addresses = torch.cat([torch.arange(begin, end, mmap.PAGESIZE) for begin, end, _ in spans])
    counts = torch.tensor([(end - begin) // mmap.PAGESIZE for begin, end, _ in spans])
    nodes = torch.tensor([node for _, _, node in spans], dtype=torch.int32).repeat_interleave(counts)
    if number is None:
        reason = f"The number of the system call move_pages is not known for {platform.machine()}."
        return Placement(len(nodes), 0, reason)
    lies = torch.full_like(nodes, -1)
    error = _move_pages(number, addresses, nodes, lies)
    if error in (0, errno.ENOENT):  # older kernels' word for nothing to move
        error = _move_pages(number, addresses, None, lies)
    if error:
        return Placement(len(nodes), 0, f"The kernel moves no pages to nodes: {os.strerror(error)}.")
    return Placement(len(nodes), int((lies == nodes).sum()))


def _move_pages(number: int, addresses: torch.Tensor, nodes: torch.Tensor | None, lies: torch.Tensor) -> int:
    """Fills `lies` with each page's node or an error below 0, and without `nodes` moves nothing. The call's error."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    arrays = (ctypes.c_void_p(None if each is None else each.data_ptr()) for each in (addresses, nodes, lies))
    outcome = call(
        *(ctypes.c_long(number), ctypes.c_long(_OWN_PROCESS), ctypes.c_ulong(len(addresses))),
        *(*arrays, ctypes.c_int(_MOVE_OWN)),
    )
    return ctypes.get_errno() if outcome < 0 else 0


def _joined(matrices: Sequence[Matrix]) -> Iterator[Shared]:
    """Matrices whose blocks follow one another in one product."""
    blocks, first = sum(matrix.numbers.shape[0] for matrix in matrices), 0
    for matrix in matrices:
        yield Shared(matrix, first, blocks)
        first += matrix.numbers.shape[0]
