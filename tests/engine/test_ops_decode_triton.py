"""The CUDA decoder's Triton operators without a GPU: interpreted against float64, and compiled for one.

In separate processes, because a kernel is interpreted or not from the moment that its module is imported. What is
checked: triton_decode.py.
"""

import pytest
import torch

from optigpu.ops.decode.cpu.packing import pack, unpack
from optigpu.ops.decode.cuda.packing import (
    joined,
    numbers_shape,
    pack_for_cuda,
    rows_from,
    stacked,
    unpack_from_cuda,
)
from optigpu.ops.decode.program import FEW_BITS, WEIGHT_KINDS, WeightKind
from optigpu.ops.layouts import decode_bytes
from optigpu.vocabulary import DeviceKind
from tests.breadth import cases
from tests.engine.native_paths import assert_right

SCENES = (
    "linear_layers",
    "every_weight",
    "linear_endings",
    "most_likely",
    "beginnings",
    "attentions",
    "prefills",
    "steps",
    "decoding",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", cases(["everything", " ".join(SCENES), "other_steps"], by_default=1))
def test_the_operators_are_right_where_they_are_interpreted(names: str) -> None:
    calls = "".join(f"{name}()\n" for name in names.split())
    code = f"from tests.engine.triton_decode import {', '.join(names.split())}\n{calls}print('right')"
    assert_right(code, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_packed_numbers_are_those_of_the_cpu(kind: WeightKind, group: int) -> None:
    weight = torch.randn(37, 256, generator=torch.Generator().manual_seed(group))
    weight[3] = 0
    packed = pack_for_cuda(weight, None, kind, group)
    assert packed.numbers.shape == numbers_shape(kind, 37, 256)
    assert torch.equal(unpack_from_cuda(packed), unpack(pack(weight, None, kind, group)))
    tensors = (packed.numbers, packed.scale, packed.unit)
    stored = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert stored == decode_bytes(37, 256, DeviceKind.CUDA, kind=kind, group=group)


def test_matrices_of_a_kind_that_follow_each_other_are_joined() -> None:
    weights = [torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) for rows in (6, 2, 3)]
    first, second = (pack_for_cuda(weight, None, "w8", 32) for weight in weights[:2])
    third = pack_for_cuda(weights[2], torch.ones(3), "w8", 32)
    (whole,) = joined([first, second, third])
    assert torch.equal(
        unpack_from_cuda(whole), torch.cat([unpack_from_cuda(each) for each in (first, second, third)])
    )
    assert whole.bias is not None
    assert whole.bias.tolist() == [0] * 8 + [1] * 3
    assert len(joined([first, pack_for_cuda(weights[1], None, "w4", 32), third])) == 3
    for kind in FEW_BITS:
        parts = [pack_for_cuda(weight, None, kind, 32) for weight in weights]
        (whole,) = joined(parts)
        assert torch.equal(unpack_from_cuda(whole), torch.cat([unpack_from_cuda(each) for each in parts]))


def test_experts_that_follow_one_another_in_memory_are_joined_without_a_copy() -> None:
    whole = pack_for_cuda(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), None, "w4", 32)
    parts = [rows_from(whole, slice(row, row + 4), 4) for row in (0, 4)]
    ((matrix, places),) = stacked(parts)
    assert matrix.numbers.data_ptr() == whole.numbers.data_ptr()
    assert unpack_from_cuda(matrix).equal(unpack_from_cuda(whole))
    assert places.tolist() == [0, 1]
    (last, first), (other, places) = stacked(
        [parts[1], pack_for_cuda(torch.ones(4, 64), None, "w8", 32), parts[0]]
    )
    assert unpack_from_cuda(last).equal(unpack_from_cuda(whole).roll(4, 0))
    assert (first.tolist(), places.tolist(), other.kind) == ([0, -1, 1], [-1, 0, -1], "w8")


def test_packing_refuses_what_it_cannot_hold() -> None:
    good = torch.ones(2, 64)
    scenes: tuple[tuple[torch.Tensor, torch.Tensor | None, WeightKind, int, str], ...] = (
        (good.long(), None, "w4", 32, "floating-point matrix"),
        (good, None, "w4", 48, "group must be one of"),
        (torch.ones(2, 40), None, "w8", 32, "do not divide"),
        (good / 0, None, "bf16", 0, "finite weights"),
        (good, torch.ones(3), "w4", 32, "bias"),
    )
    for weight, bias, kind, group, words in scenes:
        with pytest.raises(ValueError, match=words):
            pack_for_cuda(weight, bias, kind, group)
