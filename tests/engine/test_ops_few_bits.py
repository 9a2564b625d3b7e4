"""Weights of 3 and 4 bits with errors that make up for each other or uneven values, in torch and in C++."""

from typing import Any

import pytest
import torch

from optigpu.ops.decode.cpu.packing import squared_errors
from optigpu.ops.decode.program import FEW_BITS
from optigpu.ops.four_bits import compensated as int4_compensated
from optigpu.ops.four_bits import quantize as int4_quantize
from optigpu.ops.four_bits.compensated import (
    Compensation,
    compensated_groups,
    compensation,
    improved_groups,
    share_left,
)
from optigpu.ops.four_bits.few_bits import (
    FEW_BITS_INSTRUCTION_SETS,
    Coupling,
    few_bits_reason,
    multiplies_bfloat16,
    round_groups,
)
from optigpu.ops.four_bits.grid import Even, Grid, Uneven, grid_of
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups, rounding_of, scale_units
from optigpu.ops.four_bits.scheme import EIGHT, FURTHEST, REACH, SIXTEEN, Int4Scheme, Int4Weights
from tests.breadth import cases

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SCHEMES = [Int4Scheme(size) for size in (32, 64, 128)]


def drawn_weight(outputs: int = 48, inputs: int = 256) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


def correlated(samples: int = 600, inputs: int = 256) -> torch.Tensor:
    """Inputs of which each says something about the others, as activations do."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(64, inputs, generator=generator)
    return torch.randn(samples, 64, generator=generator) @ mixing + 0.3 * torch.randn(
        samples, inputs, generator=generator
    )


def output_error(x: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((x.double() @ (exact - rounded).double().T).square().mean())


def compensated(given: torch.Tensor, moment: torch.Tensor, scheme: Int4Scheme) -> torch.Tensor:
    """The weights that are left, float32 [outputs, inputs]."""
    unit = scale_units(given, 8)
    return whole(compensated_groups(given, compensation(moment), scheme, unit), unit)


def plain(given: torch.Tensor, scheme: Int4Scheme) -> torch.Tensor:
    unit = scale_units(given, 8)
    return whole(quantize_groups(given, scheme, unit), unit)


def whole(found: Int4Weights, unit: torch.Tensor) -> torch.Tensor:
    return dequantize_groups(found._replace(scale=found.scale * unit.float()[:, None]))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.group_size))
def test_errors_make_up_for_each_other_on_inputs_like_the_samples(scheme: Int4Scheme) -> None:
    samples, unseen = correlated().split([400, 200])
    found = output_error(unseen, drawn_weight(), compensated(drawn_weight(), samples.T @ samples, scheme))
    assert found < 0.5 * output_error(unseen, drawn_weight(), plain(drawn_weight(), scheme))


def test_no_number_could_be_improved_alone_when_there_is_nothing_left_to_improve() -> None:
    """After many rounds: of every number the two beside it are tried, with the error written out."""
    given, samples = drawn_weight(4, 64), correlated()[:, :64]
    known, unit = compensation(samples.T @ samples), scale_units(given, 8)
    start = quantize_groups(given, Int4Scheme(32), unit)
    for _ in range(30):
        start = improved_groups(given, known, start, unit, Even())

    def loss(found: Int4Weights) -> torch.Tensor:
        error = (given - whole(found, unit)).double()
        return torch.einsum("oi,ij,oj->o", error, known.moment.double(), error)

    least = loss(start)
    for place in range(64):
        for step in (-1, 1):
            q = start.q.int()
            q[:, place] = (q[:, place] + step).clamp(0, 15)
            assert bool((loss(start._replace(q=q.to(torch.uint8))) >= least * (1 - 1e-5)).all())


@pytest.mark.parametrize("are_alike", [False, True])
def test_the_share_of_the_error_that_is_left_is_known_from_the_inputs(are_alike: bool) -> None:
    x = correlated() if are_alike else torch.randn(4096, 256, generator=torch.Generator().manual_seed(2))
    moment = x.T @ x
    found = output_error(x, drawn_weight(), compensated(drawn_weight(), moment, Int4Scheme(32)))
    left = found / output_error(x, drawn_weight(), plain(drawn_weight(), Int4Scheme(32)))
    assert 0.5 < left / share_left(moment) < 1.1, "descent leaves less than the first rounding"
    assert (share_left(moment) < 0.5) is are_alike


# ---- Uneven values.


TABLES = pytest.mark.parametrize("table", [EIGHT, SIXTEEN], ids=["eight", "sixteen"])
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def units(weight: torch.Tensor) -> torch.Tensor:
    return scale_units(weight, int(-FURTHEST / REACH))


@pytest.mark.parametrize(
    ("grid", "count"), [(Even(), 16), (Even(-32), 64), (Uneven(SIXTEEN, CPU), 16), (Uneven(EIGHT, CPU), 8)]
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
def test_numbers_are_the_nearest_for_the_scale_that_is_stored(unit: bool, table: tuple[int, ...]) -> None:
    weight = random(24, 128)
    unit_of = units(weight) if unit else None
    found = quantize_groups(weight, Int4Scheme(64, table=table), unit_of)
    scale = found.scale.float() if unit_of is None else found.scale * unit_of.float()[:, None]
    grid = Uneven(table, CPU)
    moved = torch.zeros_like(scale) if unit_of is None else grid.moved(found.scale)
    asked = (weight.unflatten(1, (-1, 64)) / scale[:, :, None] - moved[:, :, None]).flatten(1)
    expected = grid.numbers(asked)
    assert (found.q == expected).float().mean() > 0.999  # a last bit of a quotient may turn a tie


@pytest.mark.parametrize(("group", "most"), [(32, 0.026), (64, 0.03), (128, 0.034)])
def test_normal_weights_lose_what_so_many_values_must(group: int, most: float) -> None:
    """The best 8 values for each weight by itself would leave 0.0345 of normally distributed ones."""
    weight = random(256, 512)
    errors = (float(squared_errors(weight, kind, group).sum()) for kind in FEW_BITS)
    three, even, uneven, five, six = (error / float(weight.square().sum()) for error in errors)
    assert 0.02 < three < most
    assert max(uneven / even / 3, five / even, six / five) < 0.26


def test_offsets_and_uneven_values_are_refused() -> None:
    with pytest.raises(ValueError, match="uneven values only for a symmetric scheme"):
        quantize_groups(random(4, 64), Int4Scheme(64, symmetric=False, table=SIXTEEN))


# ---- The C++ operators beside torch's.


NO_COMPILER = "There is no compiler."
EVERY = pytest.mark.parametrize("table", [(), EIGHT, SIXTEEN], ids=["even", "eight", "sixteen"])


def paths() -> list[int]:
    """The numbers of the instruction sets that this CPU has."""
    assert few_bits_reason() is None
    return [number for number in FEW_BITS_INSTRUCTION_SETS.values() if is_known(number)]


def is_known(number: int) -> bool:
    try:
        round_groups(torch.ones(1, 32), torch.ones(1), rounding_of(Int4Scheme()), None, number)
    except RuntimeError:
        return False
    return True


@EVERY
@pytest.mark.parametrize("size", cases([24, 128, 16, 32, 4, 64, 100]))
def test_quantized_groups_are_those_of_torch(
    size: int, table: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the least to the largest numbers, and of nothing; a last bit of a quotient may turn a tie."""
    weight = random(90, 3 * size, seed=size) * torch.logspace(-30, 15, 90)[:, None]
    weight[3], weight[5, :size] = 0, 0
    scheme = Int4Scheme(size, table=table, whole_bits=4 + size % 3)
    unit = scale_units(weight, 115 if table else -scheme.least)
    found = [
        Int4Weights(*round_groups(weight, unit.float(), rounding_of(scheme), None, path), None)
        for path in paths()
    ]
    found.append(quantize_groups(weight, scheme, unit))
    monkeypatch.setattr(int4_quantize, "few_bits_reason", lambda: NO_COMPILER)
    expected = quantize_groups(weight, scheme, unit)
    for each in found:
        assert float((each.q == expected.q).all(dim=1).float().mean()) > 0.96
        assert float((each.scale == expected.scale).all(dim=1).float().mean()) > 0.96


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


def known_of(inputs: int, products: torch.dtype = torch.float32) -> Compensation:
    """Of inputs of which each says something about the others."""
    x = random(4 * inputs, inputs, seed=2) + random(4 * inputs, 1, seed=3)
    return compensation(x.T @ x, products)


def loss_of(found: Int4Weights, weight: torch.Tensor, unit: torch.Tensor, scheme: Int4Scheme) -> torch.Tensor:
    """The squared error of each output, in float64."""
    values = grid_of(scheme, CPU).values(found.q).double().unflatten(1, (-1, scheme.group_size))
    error = (values * (found.scale * unit.double()[:, None]).unsqueeze(2)).flatten(1) - weight.double()
    losses: torch.Tensor = (error @ known_of(weight.shape[1]).moment.double()).mul_(error).sum(dim=1)
    return losses


@EVERY
@pytest.mark.parametrize(("size", "groups", "outputs"), [(32, 5, 1), (64, 4, 33), (128, 2, 100), (4, 9, 16)])
def test_compensated_groups_are_those_of_torch(
    size: int, groups: int, outputs: int, table: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for ties, which a last bit turns, and what follows from those in the same output."""
    scheme = Int4Scheme(size, table=table, whole_bits=4 + groups % 3)
    weight = random(outputs, size * groups)
    weight[outputs // 2, :size] = 0
    unit = scale_units(weight, 115 if table else -scheme.least)
    given: list[Any] = []

    def watched(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(arguments)
        return round_groups(*arguments)

    monkeypatch.setattr(int4_compensated, "round_groups", watched)
    compensated_groups(weight, known_of(size * groups), scheme, unit)
    monkeypatch.setattr(int4_compensated, "few_bits_reason", lambda: NO_COMPILER)
    expected = compensated_groups(weight, known_of(size * groups), scheme, unit)
    ((rows, units_of, how, coupling),) = given
    for path in paths():
        found = Int4Weights(*round_groups(rows, units_of, how, coupling, path), None)
        same = (found.q == expected.q).all(dim=1) & (found.scale == expected.scale).all(dim=1)
        assert float(same.float().mean()) > 0.96
        both = [loss_of(each, weight, unit, scheme) for each in (found, expected)]
        torch.testing.assert_close(*both, rtol=0.1, atol=0.0)


@EVERY
def test_errors_in_bfloat16_leave_no_larger_ones(table: tuple[int, ...]) -> None:
    scheme, weight = Int4Scheme(32, table=table), random(200, 256)
    unit = scale_units(weight, 115 if table else 8)
    if not multiplies_bfloat16():
        with pytest.raises(RuntimeError, match="no products of bfloat16"):
            compensated_groups(weight, known_of(256, torch.bfloat16), scheme, unit)
        return
    losses = [
        float(
            loss_of(
                compensated_groups(weight, known_of(256, products), scheme, unit), weight, unit, scheme
            ).sum()
        )
        for products in (torch.bfloat16, torch.float32)
    ]
    assert losses[0] < 1.02 * losses[1]


@EVERY
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_an_output_s_numbers_depend_neither_on_others_nor_on_threads(
    products: torch.dtype, table: tuple[int, ...]
) -> None:
    products = products if multiplies_bfloat16() else torch.float32
    scheme, weight, known = Int4Scheme(32, table=table), random(300, 96), known_of(96, products)
    unit = scale_units(weight, 115 if table else 8)
    all_ = compensated_groups(weight, known, scheme, unit)
    torch.set_num_threads(3)  # the fixture sets it back
    several = compensated_groups(weight, known, scheme, unit)
    assert several.q.equal(all_.q)
    assert several.scale.equal(all_.scale)
    some = compensated_groups(weight[70:105], known, scheme, unit[70:105])
    assert some.q.equal(all_.q[70:105])
    assert some.scale.equal(all_.scale[70:105])


def test_what_does_not_fit_is_refused() -> None:
    assert few_bits_reason() is None
    four = rounding_of(Int4Scheme(8))
    for values in (torch.ones(1), torch.ones(17)):
        with pytest.raises(RuntimeError, match="2 to 16 values"):
            round_groups(torch.ones(4, 8), torch.ones(4), four._replace(values=values))
    for size in (2, 6, 132):
        with pytest.raises(RuntimeError, match="4 to 128 inputs"):
            round_groups(torch.ones(4, size), torch.ones(4), four._replace(size=size))
    coupling = Coupling(torch.eye(8), torch.eye(4), torch.eye(8)[None], torch.eye(8)[None])
    with pytest.raises(RuntimeError, match="factors must be 64 contiguous"):
        round_groups(torch.ones(4, 8), torch.ones(4), four, coupling)
    with pytest.raises(RuntimeError, match="units must be 4 contiguous"):
        round_groups(torch.ones(4, 8), torch.ones(3), four, coupling)
