"""The decoder's packed weights: their layout and values, the memory that they share, and where its pages go."""

import mmap
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optigpu.hardware.cpu import node_of_each_cpu
from optigpu.ops.decode.cpu import packing
from optigpu.ops.decode.cpu.arena import ALIGNMENT, HUGE_PAGE_BYTES, Arena
from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.cpu.packing import ROWS, pack, quantize_eight, squared_errors, unpack
from optigpu.ops.decode.cpu.placement import (
    Placement,
    Span,
    huge_mappings,
    moved,
    pages_of,
    place,
    planned,
    read_by_threads,
    shared_matrices,
)
from optigpu.ops.decode.program import GROUPS, WEIGHT_KINDS, Program, WeightKind
from optigpu.ops.four_bits.quantize import quantize_groups, scale_units
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights
from optigpu.ops.layouts import decode_bytes
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import spread
from tests.engine.random_programs import CONTEXT, LIKE_GPT2, LIKE_LLAMA, Shape, random_program, tokens

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = ((1, 32), (16, 96), (17, 64), (40, 128))


def weights(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def four_bits(weight: torch.Tensor, group: int) -> tuple[Int4Weights, torch.Tensor]:
    """And the scales that the numbers were chosen for, float32 [outputs, groups]."""
    unit = scale_units(weight, 8)
    found = quantize_groups(weight, Int4Scheme(group), unit)
    return found, found.scale.float() * unit.float()[:, None]


def eight_bits(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and their scales float32 [outputs, groups]."""
    unit = scale_units(weight, 127)
    q, scale = quantize_eight(weight, group, unit)
    return q, scale.float() * unit.float()[:, None]


@pytest.mark.parametrize(("group", "shape"), spread(GROUPS, [(shape,) for shape in SHAPES], by_default=4))
def test_it_stands_for_what_was_quantized(shape: tuple[int, int], group: int) -> None:
    outputs, inputs = shape[0], shape[1] * group // 32
    weight = weights(outputs, inputs)
    four, scale = four_bits(weight, group)
    numbers = four.q.unflatten(1, (-1, group)).float() - 8
    assert unpack(pack(weight, None, "w4", group)).equal((numbers * scale[:, :, None]).flatten(1))
    q, scale = eight_bits(weight, group)
    eight = (q.unflatten(1, (-1, group)).float() * scale[:, :, None]).flatten(1)
    assert unpack(pack(weight, None, "w8", group)).equal(eight)
    assert unpack(pack(weight, None, "bf16", group)).equal(weight.bfloat16().float())


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_a_matrix_is_packed_in_strips_as_it_would_be_at_once(
    kind: WeightKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weights(90, 64)
    whole, errors = pack(weight, None, kind, 32), squared_errors(weight, kind, 32)
    expected = unpack(whole)
    monkeypatch.setattr(packing, "AT_ONCE", 2 * ROWS * 64)
    parts = pack(weight, None, kind, 32)
    assert parts.numbers.equal(whole.numbers)
    assert whole.scale is None or (parts.scale is not None and parts.scale.equal(whole.scale))
    assert unpack(parts).equal(expected)
    assert squared_errors(weight, kind, 32).equal(errors)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_errors_are_those_of_the_weights_that_it_stands_for(kind: WeightKind) -> None:
    weight = weights(19, 96)
    apart = (unpack(pack(weight, None, kind, 32)) - weight).square()
    expected = apart.unflatten(1, (-1, 32)).sum(dim=2)
    torch.testing.assert_close(squared_errors(weight, kind, 32), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_come_in_any_floating_point_and_in_any_order(dtype: torch.dtype) -> None:
    """Those of a Conv1D are the other way round in memory."""
    weight = weights(64, 24).to(dtype).T
    for kind in WEIGHT_KINDS:
        expected = pack(weight.float().contiguous(), None, kind, 32)
        found = pack(weight, None, kind, 32)
        assert found.numbers.equal(expected.numbers)


def test_a_bias_is_float32_and_filled_up_with_zeros() -> None:
    bias = torch.arange(20).bfloat16()
    found = pack(weights(20, 32), bias, "w8", 32).bias
    assert found is not None
    assert found.dtype == torch.float32
    assert found.tolist() == [*range(20), *[0] * 12]
    assert pack(weights(20, 32), None, "w8", 32).bias is None


@pytest.mark.parametrize("group", GROUPS)
def test_eight_bits_reach_127_and_never_more(group: int) -> None:
    """Whatever bfloat16 makes of the unit: for largest weights from 1 to 2, and for the least that there are."""
    largest = torch.linspace(1, 2, 4096)[:, None]
    weight = largest * (1 - 2 * torch.rand(4096, 2 * group, generator=torch.Generator().manual_seed(1)))
    weight[:, group:] *= torch.linspace(0.01, 1, 4096)[:, None]
    weight[:, 3:4] = largest
    weight[::2, 3] *= -1
    q, scale = eight_bits(weight, group)
    assert (int(q.min()), int(q.max())) == (-127, 127)
    step = scale.repeat_interleave(group, dim=1)
    # A largest weight may be half a step beyond 127, where bfloat16 has rounded the unit downwards.
    assert bool(((q.float() * step - weight).abs() <= torch.where(q.abs() == 127, 1.01, 0.51) * step).all())
    fair = weight.unflatten(1, (2, group)).abs().amax(dim=2) / 127
    assert bool((scale <= fair + 1.01 * largest / 127**2).all())
    for tiny in (0.0, 1e-45, 3e-40, 1e-36):
        matrix = pack(torch.full((1, group), -tiny), None, "w8", group)
        assert matrix.unit is not None
        assert matrix.scale is not None
        assert float(matrix.unit[0, 0]) > 0
        assert int(matrix.scale[0, 0, 0]) > 0
        assert bool(unpack(matrix).isfinite().all())


@pytest.mark.parametrize(("kind", "shape"), spread(WEIGHT_KINDS, [(s,) for s in SHAPES], by_default=5))
def test_a_matrix_takes_of_an_arena_what_was_said(kind: WeightKind, shape: tuple[int, int]) -> None:
    arena = Arena(decode_bytes(*shape, DeviceKind.CPU, kind=kind, group=32) + ALIGNMENT)
    matrix = pack(weights(*shape), None, kind, 32, arena)
    alone = pack(weights(*shape), None, kind, 32)
    assert matrix.numbers.equal(alone.numbers)
    assert unpack(matrix).equal(unpack(alone))
    assert matrix.numbers.data_ptr() % ALIGNMENT == 0
    arena.take((ALIGNMENT,), torch.uint8)
    with pytest.raises(ValueError, match=r"0 bytes left, and \(1,\) takes 1"):
        arena.take((1,), torch.uint8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack(weights(4, 40), None, "w4", 32), "Groups of 32 do not divide 40 inputs"),
        (lambda: pack(weights(4, 64), None, "w8", 16), "group must be one of 32, 64, 128, not 16"),
        (lambda: pack(weights(4, 0), None, "w4", 32), "do not divide 0 inputs"),
        (lambda: pack(weights(4, 7), None, "bf16", 0), "even number of inputs, not 7"),
        (lambda: pack(weights(4, 32).int(), None, "w4", 32), r"floating-point matrix, not int32 \[4, 32\]"),
        (lambda: pack(weights(4, 32)[0], None, "w4", 32), r"matrix, not float32 \[32\]"),
        (lambda: pack(weights(4, 32).to("meta"), None, "w4", 32), "on the CPU, not on meta"),
        (lambda: pack(weights(4, 32), torch.zeros(5), "w4", 32), "one finite bias for each of 4 outputs"),
        (lambda: pack(weights(4, 32), torch.full((4,), torch.inf), "w4", 32), "finite bias"),
        (lambda: pack(weights(4, 32) * torch.nan, None, "w3k", 32), "holds NaN or infinity"),
        (lambda: pack(weights(4, 32) * torch.inf, None, "bf16", 32), "holds NaN or infinity"),
    ],
)
def test_what_cannot_be_packed_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_an_arena_lies_in_memory_that_huge_pages_were_asked_for() -> None:
    arena = Arena(3 * HUGE_PAGE_BYTES + 1)
    assert arena.huge
    tensor = arena.take((3 * HUGE_PAGE_BYTES + 1,), torch.uint8)
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    for byte in (0, 3 * HUGE_PAGE_BYTES):
        assert "hg" in flags_at(tensor.data_ptr() + byte)


def test_an_arena_that_no_memory_has_room_for_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not enough memory for 1152921504606846976 bytes of weights"):
        Arena(2**60)


def flags_at(address: int) -> list[str]:
    """What the kernel keeps of the mapping that an address lies in (VmFlags of proc_pid_smaps(5))."""
    inside = False
    for line in Path(f"/proc/{os.getpid()}/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address}")


# ---- Where pages go.


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


# ---- What each thread reads.
@pytest.mark.parametrize(("shape", "threads"), [(LIKE_GPT2, 3), (LIKE_LLAMA, 1), (LIKE_LLAMA, 40)])
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


@pytest.mark.slow
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
