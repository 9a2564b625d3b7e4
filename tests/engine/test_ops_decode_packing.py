"""The decoder's packed weights have the operator's layout and the quantized values, and share one memory."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.ops.decode.cpu import packing
from optigpu.ops.decode.cpu.arena import ALIGNMENT, HUGE_PAGE_BYTES, Arena, aligned
from optigpu.ops.decode.cpu.packing import ROWS, pack, quantize_eight, squared_errors, unpack
from optigpu.ops.decode.program import GROUPS, WeightKind
from optigpu.ops.four_bits.quantize import quantize_groups, scale_units
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights
from optigpu.ops.layouts import decode_bytes
from optigpu.vocabulary import DeviceKind, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

KINDS: tuple[WeightKind, ...] = ("w3k", "w4", "w4k", "w8", "bf16")
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


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_the_weights_that_it_stands_for(kind: WeightKind) -> None:
    weight = weights(19, 96)
    apart = (unpack(pack(weight, None, kind, 32)) - weight).square()
    expected = apart.unflatten(1, (-1, 32)).sum(dim=2)
    torch.testing.assert_close(squared_errors(weight, kind, 32), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_come_in_any_floating_point_and_in_any_order(dtype: torch.dtype) -> None:
    """Those of a Conv1D are the other way round in memory."""
    weight = weights(64, 24).to(dtype).T
    for kind in KINDS:
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
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
        *(
            (lambda kind=kind, bad=bad: pack(weights(4, 32) * bad, None, kind, 32), "holds NaN or infinity")
            for kind in KINDS
            for bad in (torch.nan, torch.inf)
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_tensors_of_an_arena_are_aligned_and_lie_in_one_storage() -> None:
    arena = Arena(aligned(5) + aligned(12) + 8)
    taken = [arena.take((5,), torch.uint8), arena.take((2, 3), torch.bfloat16), arena.take((2,), torch.int32)]
    assert {tensor.untyped_storage().data_ptr() for tensor in taken} == {taken[0].data_ptr()}
    assert taken[0].untyped_storage().nbytes() == 2 * ALIGNMENT + 8
    assert [tensor.data_ptr() - taken[0].data_ptr() for tensor in taken] == [0, ALIGNMENT, 2 * ALIGNMENT]
    for number, tensor in enumerate(taken, start=1):
        assert not bool(tensor.any())
        tensor.fill_(number)
    assert [tensor.flatten()[0].item() for tensor in taken] == [1, 2, 3]


def test_an_arena_lies_in_memory_that_huge_pages_were_asked_for() -> None:
    arena = Arena(3 * HUGE_PAGE_BYTES + 1)
    assert arena.huge
    tensor = arena.take((3 * HUGE_PAGE_BYTES + 1,), torch.uint8)
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    for byte in (0, 3 * HUGE_PAGE_BYTES):
        assert "hg" in flags_at(tensor.data_ptr() + byte)


def test_an_arena_does_without_huge_pages_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    arena = Arena(HUGE_PAGE_BYTES)
    assert not arena.huge
    tensor = arena.take((HUGE_PAGE_BYTES,), torch.uint8).fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * HUGE_PAGE_BYTES
    assert "hg" not in flags_at(tensor.data_ptr())


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
