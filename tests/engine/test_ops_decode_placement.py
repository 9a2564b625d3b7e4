"""Where the pages of packed weights go: the plan on made-up machines, and the system call on this one."""

import mmap
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optigpu.hardware.cpu import node_of_each_cpu, one_cpu_of_each_core
from optigpu.ops.decode.cpu.arena import HUGE_PAGE_BYTES, Arena
from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.cpu.placement import (
    Placement,
    Span,
    chosen_cpus,
    huge_mappings,
    moved,
    pages_of,
    place,
    planned,
    read_by_threads,
    shared_matrices,
)
from optigpu.ops.decode.program import Program
from optigpu.techniques.decoding.native_decode.decoders import placement_facts
from tests.engine.random_programs import CONTEXT, LIKE_GPT2, LIKE_LLAMA, Shape, random_program, tokens

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ALTERNATING = {cpu: cpu % 2 for cpu in range(8)}
PAGE = 4096
NODE = min(node_of_each_cpu().values(), default=0)
"""Of this machine."""
NO_SUCH_CALL = 100_000
"""For a number of no system call a kernel answers what it answers to move_pages where it lacks memory nodes: ENOSYS."""

needs_nodes = pytest.mark.usefixtures("nodes_here")


@pytest.fixture
def nodes_here() -> None:
    assert node_of_each_cpu(), (
        "these tests need a kernel with memory nodes, as all of Linux's distributions have"
    )


# ---- Which thread is where.


def test_threads_of_a_node_follow_one_another() -> None:
    assert chosen_cpus(8, range(8), ALTERNATING) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert chosen_cpus(4, range(8), ALTERNATING) == [0, 2, 1, 3]


# ---- What each thread reads.


@pytest.mark.parametrize("shape", [LIKE_GPT2, LIKE_LLAMA])
@pytest.mark.parametrize("threads", [1, 2, 3, 8, 40])
def test_all_threads_together_read_every_byte_once(shape: Shape, threads: int) -> None:
    program = random_program(shape, "w4")
    reads = sorted(read_by_threads(program, [id % 2 for id in range(threads)]))
    assert all(before.end <= after.begin for before, after in pairwise(reads))
    assert sum(read.end - read.begin for read in reads) == sum(
        tensor.nbytes
        for each in shared_matrices(program)
        for tensor in (each.matrix.numbers, each.matrix.scale, each.matrix.unit)
        if tensor is not None
    )


# ---- Which page goes where.


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 2)), max_size=40),
    st.sampled_from([64, 256, 4096]),
)
def test_each_page_lies_where_most_of_it_is_read(parts: list[tuple[int, int]], page: int) -> None:
    reads, address, owners = [], 777, dict[int, int]()
    for size, node in parts:
        if size:
            reads.append(Span(address, address + size, node))
            owners.update(dict.fromkeys(range(address, address + size), node))
        address += size
    plan = pages_of(reads, page)
    assert all(span.begin % page == span.end % page == 0 for span in plan)
    assert all(
        before.end < after.begin or (before.end == after.begin and before.node != after.node)
        for before, after in pairwise(plan)
    )
    found = {begin: span.node for span in plan for begin in range(span.begin, span.end, page)}
    assert found.keys() == {byte // page * page for byte in owners}
    for begin, node in found.items():
        counts = [sum(owners.get(byte) == each for byte in range(begin, begin + page)) for each in range(3)]
        assert node == counts.index(max(counts))


def test_huge_pages_are_whole_and_others_small() -> None:
    huge = range(HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES)
    reads = [
        *(Span(0, 5000, 0), Span(5000, 3 * PAGE, 1)),
        *(
            Span(HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES + 5000, 0),
            Span(2 * HUGE_PAGE_BYTES + 5000, huge.stop, 1),
        ),
    ]
    assert planned(reads, [huge]) == [
        *(Span(HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES, 0), Span(2 * HUGE_PAGE_BYTES, huge.stop, 1)),
        *(Span(0, PAGE, 0), Span(PAGE, 3 * PAGE, 1)),
    ]


def test_mappings_with_huge_pages_are_found() -> None:
    smaps = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      2048 kB
7f0000400000-7f0000401000 r--p 00000000 fe:00 1234 /usr/lib/libc.so.6
AnonHugePages:         0 kB
"""
    assert huge_mappings(smaps) == [range(0x7F0000000000, 0x7F0000400000)]


# ---- The system call.


@needs_nodes
def test_every_page_lies_on_this_machines_node() -> None:
    reads = read_by_threads(random_program(LIKE_LLAMA, "w4"), [NODE, NODE])
    plan = pages_of(reads, mmap.PAGESIZE)
    pages = sum(span.end - span.begin for span in plan) // mmap.PAGESIZE
    assert pages > 50
    assert moved(plan) == Placement(pages, pages)


@needs_nodes
def test_huge_pages_of_an_arena_lie_on_this_machines_node() -> None:
    arena = Arena(3 * HUGE_PAGE_BYTES)
    weights = arena.take((3 * HUGE_PAGE_BYTES,), torch.uint8).fill_(1)
    begin, middle = weights.data_ptr(), weights.data_ptr() + 5_000_000
    reads = [Span(begin, middle, NODE), Span(middle, begin + weights.nbytes, NODE)]
    plan = planned(reads, huge_mappings(Path("/proc/self/smaps").read_text()))
    assert plan == [Span(begin, begin + weights.nbytes, NODE)]
    pages = weights.nbytes // mmap.PAGESIZE
    assert moved(plan) == Placement(pages, pages)
    assert bool((weights == 1).all())


@needs_nodes
def test_a_node_that_is_not_there_moves_nothing_and_says_so() -> None:
    area = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    area.write(b"x" * 4 * mmap.PAGESIZE)
    address = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
    found = moved([Span(address, address + 4 * mmap.PAGESIZE, 63)])
    assert (found.pages, found.there) == (4, 0)
    assert found.reason is not None
    assert "No such device" in found.reason


def test_a_kernel_without_the_call_moves_nothing_and_says_so() -> None:
    address = torch.zeros(2 * mmap.PAGESIZE, dtype=torch.uint8).data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    found = moved([Span(address, address + mmap.PAGESIZE, 0)], NO_SUCH_CALL)
    assert found == Placement(1, 0, "The kernel moves no pages to nodes: Function not implemented.")


# ---- The decoder.


def decoded(decoder: CpuDecoder) -> tuple[torch.Tensor, torch.Tensor]:
    decoder.begin(1, CONTEXT)
    first = decoder.extend(tokens(LIKE_LLAMA, 1, 9)).argmax(1, keepdim=True)
    return decoder.decode(first, 8), decoder.logits.clone()


@pytest.mark.parametrize("nodes", [{}, dict.fromkeys(range(8), 0)])
def test_with_one_node_nothing_is_done(nodes: dict[int, int]) -> None:
    assert place(random_program(LIKE_LLAMA, "w4"), range(8), nodes) is None


def test_a_decoder_here_does_what_the_nodes_of_this_machine_ask_for() -> None:
    cpus = one_cpu_of_each_core()
    decoder = CpuDecoder(random_program(LIKE_LLAMA, "w4"), threads=len(cpus), cpus=cpus)
    several = len(set(node_of_each_cpu().values())) > 1 and len(cpus) > 1
    assert (decoder.placement is not None) == several


def test_a_result_says_where_weights_lie() -> None:
    decoder = CpuDecoder(random_program(LIKE_LLAMA, "w4"), threads=1)
    assert placement_facts(decoder) == {}
    decoder.placement = Placement(8, 8)
    assert placement_facts(decoder) == {"weight_pages": 8, "weight_pages_on_chosen_nodes": 8}
    decoder.placement = Placement(4, 0, "The kernel moves no pages.")
    assert placement_facts(decoder) == {
        "weight_pages": 4,
        "weight_pages_on_chosen_nodes": 0,
        "weight_pages_not_moved": "The kernel moves no pages.",
    }


@needs_nodes
@pytest.mark.parametrize("threads", [2, 3])
def test_what_is_computed_does_not_depend_on_where_weights_lie(threads: int) -> None:
    program: Program = random_program(LIKE_LLAMA, "w4")
    decoder = CpuDecoder(program, threads=threads)
    before = decoded(decoder)
    found = place(program, [0, 1, 0][:threads], {0: NODE, 1: NODE, 2: NODE + 1})
    assert found is not None
    assert found.reason is None
    after = decoded(decoder)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
