"""The C++ operators of packing give what torch's operators give: uneven values bit for bit."""

import pytest
import torch

from optigpu.ops.four_bits import grid as int4_grid
from optigpu.ops.four_bits import in_order as int4_in_order
from optigpu.ops.four_bits.few_bits import (
    FEW_BITS_INSTRUCTION_SETS,
    add_moment,
    few_bits_reason,
    in_order,
    multiplies_bfloat16,
    uneven_errors,
    uneven_numbers,
)
from optigpu.ops.four_bits.grid import Even, Grid, Uneven
from optigpu.ops.four_bits.in_order import improved_in_order, rounded_in_order
from optigpu.ops.four_bits.quantize import quantize_groups, scale_units
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.four_bits.table import EIGHT, SIXTEEN

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CPU = torch.device("cpu")
NO_COMPILER = "There is no compiler."
TABLES = pytest.mark.parametrize("table", [EIGHT, SIXTEEN], ids=["eight", "sixteen"])
EVERY = [Even(), Uneven(EIGHT, CPU), Uneven(SIXTEEN, CPU)]
GRIDS = pytest.mark.parametrize("grid", EVERY, ids=["even", "eight", "sixteen"])


def paths() -> list[int]:
    """The numbers of the instruction sets that this CPU has."""
    assert few_bits_reason() is None
    return [number for number in FEW_BITS_INSTRUCTION_SETS.values() if is_known(number)]


def is_known(number: int) -> bool:
    one = torch.ones(1, 1)
    try:
        uneven_errors(one, one, torch.tensor([0.0, 1.0]), number)
    except RuntimeError:
        return False
    return True


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def without_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (int4_grid, int4_in_order):
        monkeypatch.setattr(module, "few_bits_reason", lambda: NO_COMPILER)


def groups_of(size: int) -> torch.Tensor:
    """float32 [40, size], from the least to the largest numbers; one group is nothing."""
    groups = random(40, size, seed=size) * torch.logspace(-42, 36, 40)[:, None]
    groups[3] = 0
    return groups


@TABLES
def test_errors_and_numbers_of_uneven_values_are_torch_s_bit_for_bit(table: tuple[int, ...]) -> None:
    grid = Uneven(table, CPU)
    for size in range(1, 130):
        groups = groups_of(size)
        scale = groups.abs().amax(dim=1, keepdim=True) / 113
        scale = torch.where(scale == 0, 1, scale) * random(40, 1).sign()
        numbers = grid.numbers(groups / scale)
        errors = grid.nearest_(groups / scale).mul_(scale).sub_(groups).square_()
        for path in paths():
            assert uneven_numbers(groups, scale, grid.table, path).equal(numbers)
            assert (
                uneven_errors(groups, scale, grid.table, path)
                .view(torch.int32)
                .equal(errors.view(torch.int32))
            )


@TABLES
@pytest.mark.parametrize("has_unit", [False, True])
@pytest.mark.parametrize("size", [16, 24, 32, 50, 64, 100, 128])
def test_quantized_groups_are_those_of_torch(
    size: int, has_unit: bool, table: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, scheme = groups_of(3 * size), Int4Scheme(size, table=table)
    unit = scale_units(weight, 115) if has_unit else None
    found = quantize_groups(weight, scheme, unit)
    monkeypatch.setattr(int4_grid, "few_bits_reason", lambda: NO_COMPILER)
    expected = quantize_groups(weight, scheme, unit)
    assert found.q.equal(expected.q)
    assert found.scale.equal(expected.scale)


@pytest.mark.parametrize(
    "scheme", [Int4Scheme(64), Int4Scheme(64, symmetric=False), Int4Scheme(64, table=EIGHT)]
)
def test_several_threads_give_what_one_gives(scheme: Int4Scheme) -> None:
    weight = random(700, 512)
    one = quantize_groups(weight, scheme)
    torch.set_num_threads(3)  # the fixture sets it back
    several = quantize_groups(weight, scheme)
    assert torch.get_num_threads() == 3
    assert several.q.equal(one.q)
    assert several.scale.equal(one.scale)
    offsets = [each.offset for each in (one, several) if each.offset is not None]
    assert len(offsets) == (0 if scheme.symmetric else 2)
    assert all(offset.equal(offsets[0]) for offset in offsets)


@GRIDS
@pytest.mark.parametrize(("size", "outputs"), [(32, 1), (64, 33), (128, 100), (7, 16)])
@pytest.mark.usefixtures("without_operators")
def test_inputs_are_rounded_in_order_as_by_torch(size: int, outputs: int, grid: Grid) -> None:
    """But for ties, which a last bit turns, and what follows from those."""
    x = random(4 * size, size, seed=2) + random(4 * size, 1, seed=3)
    own = x.T @ x / len(x)
    inverse = torch.linalg.cholesky(own).inverse().T.contiguous()
    reach = 7 if grid.table is None else 120
    left, scale = random(size, outputs), random(outputs, seed=4).abs() / reach + 1 / reach
    before = grid.nearest_(left / scale)
    pull = own @ (left - before * scale)
    rounded = rounded_in_order(left, scale, inverse, grid)
    improved = improved_in_order(before, pull, scale, own, grid)
    for path in paths():
        assert same(in_order(left, None, scale, inverse, grid.table, path), rounded) > 0.97
        assert same(in_order(pull, before, scale, own, grid.table, path), improved) > 0.97


def same(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found == expected).float().mean())


@pytest.mark.parametrize(("tokens", "inputs"), [(64, 64), (31, 100), (1, 5), (200, 130)])
def test_a_moment_is_the_sum_of_products_in_float32(tokens: int, inputs: int) -> None:
    x, moment = random(tokens, inputs).bfloat16(), torch.zeros(inputs, inputs)
    if not multiplies_bfloat16():
        with pytest.raises(RuntimeError, match="no products of bfloat16"):
            add_moment(moment, x)
        return
    for _ in range(2):
        add_moment(moment, x)
    expected = 2 * (x.double().T @ x.double())
    torch.testing.assert_close(moment.triu().double(), expected.triu(), rtol=1e-5, atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    assert few_bits_reason() is None
    groups, values = torch.ones(2, 8), torch.tensor([0.0, 1.0])
    with pytest.raises(RuntimeError, match="scales must be 2 contiguous float32"):
        uneven_errors(groups, torch.ones(3, 1), values)
    with pytest.raises(RuntimeError, match="2 to 16 values"):
        uneven_numbers(groups, torch.ones(2, 1), torch.ones(17))
    with pytest.raises(RuntimeError, match="at most 128 inputs"):
        in_order(torch.ones(129, 4), None, torch.ones(4), torch.ones(129, 129), None)
