"""4-bit numbers that stand for uneven values: a table that is denser where weights are."""

import pytest
import torch

from optigpu.ops.decode.cpu.packing import pack, squared_errors, unpack
from optigpu.ops.four_bits.compensated import compensated_groups, compensation
from optigpu.ops.four_bits.grid import Even, Grid, Uneven
from optigpu.ops.four_bits.quantize import quantize_groups, scale_units
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.four_bits.table import FURTHEST, REACH, VALUES

UNEVEN = Int4Scheme(64, uneven=True)
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def units(weight: torch.Tensor) -> torch.Tensor:
    return scale_units(weight, int(-FURTHEST / REACH))


def test_the_table_is_in_order_and_one_end_lies_further_out() -> None:
    assert list(VALUES) == sorted(set(VALUES))
    assert (len(VALUES), FURTHEST) == (16, -127)
    assert 0 < VALUES[-1] < -FURTHEST


@pytest.mark.parametrize("grid", [Even(), Uneven(CPU)], ids=["even", "uneven"])
def test_a_grid_knows_its_values_and_finds_the_nearest(grid: Grid) -> None:
    every = torch.arange(16, dtype=torch.uint8)
    values = grid.values(every)
    assert grid.numbers(values).equal(every)
    x = 200 * (random(1000) / 4)
    apart = (x[:, None] - values).abs()
    found = grid.nearest_(x.clone())
    assert (found - x).abs().equal(apart.amin(dim=1))


@pytest.mark.parametrize("unit", [False, True])
def test_numbers_are_the_nearest_ones_for_the_scale_that_is_stored(unit: bool) -> None:
    weight = random(24, 128)
    unit_of = units(weight) if unit else None
    found = quantize_groups(weight, UNEVEN, unit_of)
    scale = found.scale.float() if unit_of is None else found.scale * unit_of.float()[:, None]
    asked = (weight.unflatten(1, (-1, 64)) / scale[:, :, None]).flatten(1)
    expected = Uneven(CPU).numbers(asked)
    assert (found.q == expected).float().mean() > 0.999  # a last bit of a quotient may turn a tie


@pytest.mark.parametrize("group", [32, 64, 128])
def test_normal_weights_lose_a_tenth_less_than_with_even_values(group: int) -> None:
    weight = random(256, 512)
    uneven, even = (float(squared_errors(weight, kind, group).sum()) for kind in ("w4k", "w4"))
    assert uneven < 0.9 * even


def test_compensated_numbers_lose_less_than_with_even_values() -> None:
    weight, x = random(48, 128), random(400, 64, seed=1) @ random(64, 128, seed=2)
    moment = x.T @ x
    known = compensation(moment)

    def loss(scheme: Int4Scheme, grid: Grid, unit: torch.Tensor) -> float:
        found = compensated_groups(weight, known, scheme, unit)
        scale = (found.scale * unit.float()[:, None]).repeat_interleave(64, dim=1)
        apart = grid.values(found.q) * scale - weight
        return float(((apart @ moment) * apart).sum())

    even = loss(Int4Scheme(64), Even(), scale_units(weight, 8))
    assert loss(UNEVEN, Uneven(CPU), units(weight)) < even


def test_outputs_of_nothing_stay_nothing() -> None:
    weight = random(20, 64)
    weight[3] = 0
    found = unpack(pack(weight, None, "w4k", 32))
    assert float(found[3].abs().max()) < 1e-20
    assert float((found - weight).abs().max()) < 0.5


def test_offsets_and_uneven_values_are_refused() -> None:
    with pytest.raises(ValueError, match="uneven values only for a symmetric scheme"):
        quantize_groups(random(4, 64), Int4Scheme(64, symmetric=False, uneven=True))
