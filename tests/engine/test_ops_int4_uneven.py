"""Numbers of 3 and 4 bits that stand for uneven values: a table that is denser where weights are."""

import pytest
import torch

from optigpu.ops.decode.cpu.packing import pack, squared_errors, unpack
from optigpu.ops.decode.program import WeightKind
from optigpu.ops.four_bits.compensated import compensated_groups, compensation
from optigpu.ops.four_bits.grid import Even, Grid, Uneven
from optigpu.ops.four_bits.quantize import quantize_groups, rounded_scale, scale_units
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.four_bits.table import EIGHT, FURTHEST, MOVED, REACH, SIXTEEN

TABLES = pytest.mark.parametrize("table", [EIGHT, SIXTEEN], ids=["eight", "sixteen"])
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def units(weight: torch.Tensor) -> torch.Tensor:
    return scale_units(weight, int(-FURTHEST / REACH))


@TABLES
def test_a_table_is_in_order_and_one_end_lies_further_out(table: tuple[int, ...]) -> None:
    assert list(table) == sorted(set(table))
    assert table[0] == FURTHEST
    assert 0 < table[-1] < -FURTHEST
    assert Int4Scheme(64, table=table).bits == {8: 3.25, 16: 4.25}[len(table)]


@pytest.mark.parametrize(
    ("grid", "count"), [(Even(), 16), (Uneven(SIXTEEN, CPU), 16), (Uneven(EIGHT, CPU), 8)]
)
def test_a_grid_knows_its_values_and_finds_the_nearest(grid: Grid, count: int) -> None:
    every = torch.arange(count, dtype=torch.uint8)
    values = grid.values(every)
    assert grid.numbers(values).equal(every)
    x = 200 * (random(1000) / 4)
    apart = (x[:, None] - values).abs()
    found = grid.nearest_(x.clone())
    assert (found - x).abs().equal(apart.amin(dim=1))


@TABLES
@pytest.mark.parametrize("unit", [False, True])
def test_numbers_are_the_nearest_ones_for_the_scale_that_is_stored(
    unit: bool, table: tuple[int, ...]
) -> None:
    weight = random(24, 128)
    unit_of = units(weight) if unit else None
    found = quantize_groups(weight, Int4Scheme(64, table=table), unit_of)
    scale = found.scale.float() if unit_of is None else found.scale * unit_of.float()[:, None]
    grid = Uneven(table, CPU)
    moved = torch.zeros_like(scale) if unit_of is None else grid.moved(found.scale)
    asked = (weight.unflatten(1, (-1, 64)) / scale[:, :, None] - moved[:, :, None]).flatten(1)
    expected = grid.numbers(asked)
    assert (found.q == expected).float().mean() > 0.999  # a last bit of a quotient may turn a tie


@pytest.mark.parametrize("group", [32, 64, 128])
def test_normal_weights_lose_a_quarter_less_than_with_even_values(group: int) -> None:
    weight = random(256, 512)
    uneven, even = (float(squared_errors(weight, kind, group).sum()) for kind in ("w4k", "w4"))
    assert uneven < 0.76 * even


@pytest.mark.parametrize(("kind", "table"), [("w3k", EIGHT), ("w4k", SIXTEEN)])
def test_half_of_the_groups_have_the_moved_grid(kind: WeightKind, table: tuple[int, ...]) -> None:
    matrix = pack(random(256, 512), None, kind, 32)
    assert matrix.scale is not None
    assert matrix.unit is not None
    odd = matrix.scale & 1
    assert 0.4 < float(odd.float().mean()) < 0.6
    # Unpacked by hand: what a weight is in units of its scale is a value of the table, moved where that is odd.
    scale = (matrix.scale * matrix.unit.float().unsqueeze(1)).transpose(1, 2).reshape(256, -1, 1)
    value = unpack(matrix).unflatten(1, (-1, 32)) / scale
    value -= MOVED[len(table)] * odd.transpose(1, 2).reshape(256, -1, 1)
    assert value.round().unique().tolist() == list(table)
    assert float((value - value.round()).abs().max()) < 1e-4


@pytest.mark.parametrize("odd", [0, 1])
def test_a_scale_is_the_nearest_multiple_of_its_parity(odd: int) -> None:
    unit = torch.tensor([[0.5]])
    asked = torch.arange(-140.0, 141.0)[:, None] / 2 + 0.1
    found = rounded_scale(asked, unit, odd) / unit
    assert bool((found.remainder(2) == odd).all() and (found != 0).all())
    allowed = torch.tensor([number for number in range(-127, 128) if number % 2 == odd])
    nearest = (asked / unit - allowed).abs().amin(dim=1, keepdim=True)
    not_0 = (asked / unit).abs() > 1  # 0 is no scale
    assert (asked / unit - found)[not_0].abs().equal(nearest[not_0])


@pytest.mark.parametrize(("group", "most"), [(32, 0.026), (64, 0.03), (128, 0.034)])
def test_three_bits_lose_what_eight_values_must(group: int, most: float) -> None:
    """The best 8 values for each weight by itself would leave 0.0345 of normally distributed ones."""
    weight = random(256, 512)
    lost = float(squared_errors(weight, "w3k", group).sum() / weight.square().sum())
    assert 0.02 < lost < most


def test_compensated_numbers_lose_less_than_with_even_values() -> None:
    weight, x = random(48, 128), random(400, 64, seed=1) @ random(64, 128, seed=2)
    moment = x.T @ x
    known = compensation(moment)

    def loss(scheme: Int4Scheme, grid: Grid, unit: torch.Tensor) -> float:
        found = compensated_groups(weight, known, scheme, unit)
        scale = (found.scale * unit.float()[:, None]).repeat_interleave(64, dim=1)
        moved = grid.moved(found.scale).repeat_interleave(64, dim=1)
        apart = (grid.values(found.q) + moved) * scale - weight
        return float(((apart @ moment) * apart).sum())

    even = loss(Int4Scheme(64), Even(), scale_units(weight, 8))
    scheme = Int4Scheme(64, table=SIXTEEN)
    assert loss(scheme, Uneven(SIXTEEN, CPU), units(weight)) < even


@pytest.mark.parametrize(("kind", "most"), [("w3k", 0.9), ("w4k", 0.5)])
def test_outputs_of_nothing_stay_nothing(kind: WeightKind, most: float) -> None:
    weight = random(20, 64)
    weight[3] = 0
    found = unpack(pack(weight, None, kind, 32))
    assert float(found[3].abs().max()) < 1e-20
    assert float((found - weight).abs().max()) < most


def test_offsets_and_uneven_values_are_refused() -> None:
    with pytest.raises(ValueError, match="uneven values only for a symmetric scheme"):
        quantize_groups(random(4, 64), Int4Scheme(64, symmetric=False, table=SIXTEEN))
