"""Weights as 4-bit numbers: how far off they are, with a solver and without."""

import dataclasses
from typing import Literal

import pytest
import torch

from optigpu.ops.four_bits import quantize as int4_quantize
from optigpu.ops.four_bits.quantize import (
    JUDGING_NORM,
    Int4Scheme,
    Int4Weights,
    dequantize_groups,
    quantize_groups,
    scale_units,
)

SCHEMES = [Int4Scheme(group_size=size, symmetric=kind) for size in (32, 64, 128) for kind in (True, False)]


def exact_weight(weights: Int4Weights) -> torch.Tensor:
    """float64 [outputs, inner], written apart from dequantize_groups."""
    size = weights.q.shape[1] // weights.scale.shape[1]
    found = (weights.q.double() - 8) * weights.scale.double().repeat_interleave(size, dim=1)
    return found if weights.offset is None else found + weights.offset.double().repeat_interleave(size, dim=1)


def weight_matrix() -> torch.Tensor:
    """float32 [24, 256], with the long tails that trained weights have; a group of zeros and one of equal numbers."""
    normal = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    weight = 0.02 * normal * normal.abs()
    weight[3, :128] = 0
    weight[5, 128:] = 0.3
    return weight


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounding_alone_is_wrong_by_half_a_step(scheme: Int4Scheme) -> None:
    weight = weight_matrix()
    weights = quantize_groups(weight, dataclasses.replace(scheme, solver="min_max"))
    groups = (24, 256 // scheme.group_size)
    assert weights.q.dtype == torch.uint8
    assert weights.q.shape == weight.shape
    assert int(weights.q.max()) == 15
    assert weights.scale.shape == groups
    assert (weights.offset is None) == scheme.symmetric
    step = weights.scale.double().abs().repeat_interleave(scheme.group_size, dim=1)
    found = exact_weight(weights)
    # A symmetric group's far end may be clipped by a step; bfloat16 has 1/256 of the scale's eight steps, and of 0.3.
    assert torch.all(
        (found - weight.double()).abs() <= step * (1.04 if scheme.symmetric else 0.54) + 0.3 / 256
    )
    assert not found[3, :128].any()
    torch.testing.assert_close(dequantize_groups(weights).double(), found)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_solver_comes_closer_than_rounding_alone(scheme: Int4Scheme) -> None:
    assert error(scheme) < 0.97 * error(dataclasses.replace(scheme, solver="min_max"))


def error(scheme: Int4Scheme) -> float:
    weight = weight_matrix()
    return float((dequantize_groups(quantize_groups(weight, scheme)) - weight).square().sum())


@pytest.mark.parametrize("size", [32, 64, 128])
def test_scales_of_eight_bits_and_a_unit_cost_next_to_nothing(size: Literal[32, 64, 128]) -> None:
    weight, scheme = weight_matrix(), Int4Scheme(size)
    unit = scale_units(weight, 8)
    found = quantize_groups(weight, scheme, unit)
    assert (found.scale.dtype, found.scale.shape) == (torch.int8, (24, 256 // size))
    assert int(found.scale.abs().min()) > 0
    assert int(found.scale.abs().max()) == 127
    whole = found._replace(scale=found.scale.double() * unit.double()[:, None])
    assert float((exact_weight(whole) - weight).square().sum()) < 1.02 * error(scheme)
    assert not exact_weight(whole)[3, :128].any()


def test_a_unit_is_never_nothing() -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-45, 0.0], [-127.0, 3.0]])
    assert scale_units(weight, 1).tolist() == [1, 1, 1]
    assert scale_units(weight[2:].bfloat16(), 127).tolist() == [torch.tensor(1 / 127).bfloat16()]


def test_an_offset_has_no_unit() -> None:
    with pytest.raises(ValueError, match="an offset has none"):
        quantize_groups(weight_matrix(), Int4Scheme(32, symmetric=False), torch.ones(24).bfloat16())


def test_no_group_is_worse_off_with_the_solver() -> None:
    """By the measure that it keeps the best of."""
    weight = weight_matrix()
    for symmetric in (True, False):
        losses = []
        for solver in ("hqq", "min_max"):
            found = dequantize_groups(quantize_groups(weight, Int4Scheme(32, symmetric, solver)))
            losses.append((found - weight).double().abs().pow(JUDGING_NORM).view(-1, 32).sum(dim=1))
        assert torch.all(losses[0] <= losses[1] * 1.0001)


def test_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    quantize_groups(weight_matrix(), Int4Scheme())
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rows_are_quantized_some_at_a_time(scheme: Int4Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize_groups(weight_matrix(), scheme)
    monkeypatch.setattr(int4_quantize, "AT_ONCE", {"cpu": 5 * 256})
    parts = quantize_groups(weight_matrix(), scheme)
    assert torch.equal(dequantize_groups(parts), dequantize_groups(whole))


def test_four_bits_hold_sixteen_values_exactly() -> None:
    steps = torch.arange(-8.0, 8.0).repeat(2)[None] * 0.25
    for solver in ("min_max", "hqq"):
        for symmetric in (True, False):
            scheme = Int4Scheme(32, symmetric, solver)
            assert torch.equal(dequantize_groups(quantize_groups(steps, scheme)), steps)


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (torch.zeros(32), "floating-point matrix, not torch.float32 \\[32\\]"),
        (torch.zeros(3, 32, dtype=torch.int32), "floating-point matrix, not torch.int32"),
        (torch.zeros(3, 40), "Groups of 32 do not divide 40 inputs"),
        (torch.zeros(3, 0), "Groups of 32 do not divide 0 inputs"),
        (torch.full((2, 32), torch.nan), "NaN or infinity"),
        (torch.full((2, 32), torch.inf), "NaN or infinity"),
    ],
)
def test_weights_that_cannot_be_quantized_are_refused(weight: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        quantize_groups(weight, Int4Scheme())
