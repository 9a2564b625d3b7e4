"""4-bit weights: how far off they are, and int4_linear against float64 on every instruction set that this CPU has."""

import dataclasses
from typing import Literal

import pytest
import torch

from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups, scale_units
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights
from optigpu.ops.linear.int4_linear import (
    INSTRUCTION_SETS,
    Int4Backend,
    PackedInt4,
    int4_linear,
    int4_linear_backend,
    int4_rows,
    native_reason,
    pack_int4,
)
from tests.breadth import spread
from tests.engine.native_paths import assert_keeps_promises, paths_that_run
from tests.engine.test_ops_int8_linear import TYPES, activations

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = [  # rows, inner, outputs, group: whole tiles, remainders of each kind, one of everything
    (1, 768, 64, 128),
    (1, 32, 1, 32),
    (2, 96, 33, 32),
    (3, 128, 37, 64),
    (4, 160, 31, 32),
    (5, 128, 65, 128),
    (9, 192, 16, 64),
    (40, 96, 97, 32),
]
KINDS = {"symmetric": True, "asymmetric": False}
SCHEMES = [Int4Scheme(group_size=size, symmetric=kind) for size in (32, 64, 128) for kind in (True, False)]


def numbers(inner: int, outputs: int, group: int, symmetric: bool) -> Int4Weights:
    """Any numbers at all, and scales of either sign."""
    generator = torch.Generator().manual_seed(inner * 1000 + outputs)
    shape = (outputs, inner // group)
    q = torch.randint(16, (outputs, inner), generator=generator, dtype=torch.uint8)
    scale = torch.randn(shape, generator=generator).to(torch.bfloat16)
    offset = torch.randn(shape, generator=generator).to(torch.bfloat16)
    return Int4Weights(q, scale, None if symmetric else offset)


def some_bias(outputs: int) -> torch.Tensor:
    return torch.randn(outputs, generator=torch.Generator().manual_seed(outputs))


def exact_weight(weights: Int4Weights) -> torch.Tensor:
    """float64 [outputs, groups, group], written apart from dequantize_groups."""
    grouped = weights.q.double().view(*weights.scale.shape, -1) - 8
    found = grouped * weights.scale.double()[..., None]
    return found if weights.offset is None else found + weights.offset.double()[..., None]


def assert_close_to_exact(
    y: torch.Tensor, x: torch.Tensor, weights: Int4Weights, bias: torch.Tensor | None = None
) -> None:
    """Within half a step of each activation (the largest of a group has 4177855 or more) and of float32 sums."""
    weight = exact_weight(weights)
    wide = x.double().view(*x.shape[:-1], *weight.shape[1:])
    exact = torch.einsum("...gk,ogk->...o", wide, weight)
    sizes = (weight - (0 if weights.offset is None else weights.offset.double()[..., None])).abs()
    if weights.offset is not None:
        sizes = sizes + weights.offset.double().abs()[..., None]
    digits = torch.einsum("...g,og->...o", wide.abs().amax(dim=-1), sizes.sum(dim=-1)) / 8355710
    sums = torch.einsum("...gk,ogk->...o", wide.abs(), sizes) * (weight.shape[1] + 6) * 2**-24
    if bias is not None:
        exact, sums = exact + bias.double(), sums + bias.double().abs() * 2**-24
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    allowed = digits + sums + exact.abs() * torch.finfo(y.dtype).eps / 2
    assert torch.all((y.double() - exact).abs() <= allowed)


def native_backends() -> list[Int4Backend]:
    x, weights = torch.ones(1, 32), numbers(32, 1, 32, symmetric=True)
    return paths_that_run(
        INSTRUCTION_SETS, native_reason(), lambda number: int4_linear(x, native(weights), None, number)
    )


def native(weights: Int4Weights) -> PackedInt4:
    return pack_int4(weights, "native-portable")


def test_this_cpu_runs_its_best_instruction_set_by_default() -> None:
    backends = native_backends()
    assert backends[0] == "native-portable"
    assert int4_linear_backend("cpu", torch.float32) == backends[-1]


@pytest.mark.parametrize(
    ("dtype", "symmetric", "rows", "inner", "outputs", "group"),
    spread(TYPES, KINDS.values(), SHAPES, by_default=3),
    ids=str,
)
def test_every_instruction_set_agrees_with_float64(
    rows: int, inner: int, outputs: int, group: int, symmetric: bool, dtype: torch.dtype
) -> None:
    weights, bias = numbers(inner, outputs, group, symmetric), some_bias(outputs)
    packed, x = native(weights), activations(rows, inner, dtype=dtype)
    for backend in native_backends():
        number = INSTRUCTION_SETS[backend]
        assert_close_to_exact(int4_linear(x, packed, bias, number), x, weights, bias)
        assert_close_to_exact(int4_linear(x, packed, None, number), x, weights)


@pytest.mark.parametrize("symmetric", KINDS.values(), ids=KINDS)
def test_several_threads_agree_with_float64(several_torch_threads: None, symmetric: bool) -> None:
    for shape in SHAPES:
        test_every_instruction_set_agrees_with_float64(*shape, symmetric, torch.float32)


def difficult_rows() -> torch.Tensor:
    """float32 [6, 64]: outliers, numbers next to where the step doubles, very large and very small ones, and zeros."""
    rows = activations(6, 64)
    rows[0, 5] = 1e5
    most = float.fromhex("0x1.fdfdfcp0")  # 8355711 steps: the last number before the step doubles
    rows[1] = torch.linspace(-most, most, 64)
    rows[1, 32:] = torch.linspace(-1, float.fromhex("0x1.fdfdfep0"), 32)
    rows[2] *= 1e35
    rows[3] *= 1e-30
    rows[4] = 0
    rows[5, :32] = 0
    return rows


@pytest.mark.parametrize("symmetric", KINDS.values(), ids=KINDS)
def test_difficult_activations_are_as_precise(symmetric: bool) -> None:
    weights, x = numbers(64, 40, 32, symmetric), difficult_rows()
    for backend in native_backends():
        y = int4_linear(x, native(weights), None, INSTRUCTION_SETS[backend])
        assert_close_to_exact(y, x, weights)
        assert not y[4].any()


@pytest.mark.parametrize(
    ("group", "digits"),
    spread([32, 64, 128], [((127, -128, -128),), ((-127, 127, 127),), ((126, -128, 127),)], by_default=3),
)
def test_the_largest_products_do_not_overflow(group: int, digits: tuple[int, int, int]) -> None:
    weights = numbers(128, 32, group, True)
    weights.q[::2], weights.q[1::2] = 15, 0
    x = torch.full((3, 128), float(digits[0] * 2**16 + digits[1] * 2**8 + digits[2]))
    for backend in native_backends():
        y = int4_linear(x, native(weights), None, INSTRUCTION_SETS[backend])
        assert_close_to_exact(y, x, weights)


def test_activations_are_rounded_to_the_nearest_step() -> None:
    """With errors that add up: a step is 1 here, and rounded otherwise 0.75 would be off by more than half a step."""
    weights = numbers(32, 8, 32, True)
    weights.q[:] = 15
    for sign in (1, -1):
        x = torch.full((1, 32), sign * 0.75)
        x[0, 9] = 2**22
        for backend in native_backends():
            assert_close_to_exact(
                int4_linear(x, native(weights), None, INSTRUCTION_SETS[backend]), x, weights
            )


def test_steps_are_normal_numbers() -> None:
    weights = numbers(32, 8, 32, True)
    weight = exact_weight(weights).flatten(1)
    step = 2.0**-125
    for value in (1e-33, 1e-42):
        x = torch.full((1, 32), value)
        for backend in native_backends():
            y = int4_linear(x, native(weights), None, INSTRUCTION_SETS[backend])
            size = weight.abs().sum(dim=1)
            assert torch.all(
                (y[0].double() - x.double()[0] @ weight.T).abs() <= size * (step / 2 + value * 2**-20)
            )


def test_nan_and_infinity_are_not_hidden() -> None:
    weights, x = numbers(96, 40, 32, False), activations(3, 96)
    x[0, 7] = torch.nan
    x[1, 95] = torch.inf
    for dtype in TYPES:
        for backend in native_backends():
            y = int4_linear(x.to(dtype), native(weights), None, INSTRUCTION_SETS[backend])
            assert not y[:2].isfinite().any()
            assert y[2].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "symmetric", "rows", "inner", "outputs", "group"),
    spread(TYPES, KINDS.values(), SHAPES, by_default=3),
    ids=str,
)
def test_plain_torch_agrees_with_float64(
    rows: int, inner: int, outputs: int, group: int, symmetric: bool, dtype: torch.dtype
) -> None:
    weights, bias = numbers(inner, outputs, group, symmetric), some_bias(outputs)
    x, weight = activations(rows, inner, dtype=dtype), exact_weight(weights).flatten(1)
    packed = {name: pack_int4(weights, name) for name in ("torch-int4pack", "torch-dequantize")}
    # torch's operator rounds activations, weights and results to bfloat16; the other one works in the type of x.
    for name, unit in (("torch-int4pack", 2**-8), ("torch-dequantize", torch.finfo(dtype).eps)):
        y = int4_linear(x, packed[name], bias)
        exact = x.double() @ weight.T + bias.double()
        size = x.double().abs() @ weight.abs().T + bias.double().abs()
        assert y.dtype == dtype
        assert y.shape == exact.shape
        assert torch.all((y.double() - exact).abs() <= size * 2 * unit)


@pytest.mark.parametrize("symmetric", KINDS.values(), ids=KINDS)
def test_rows_can_be_looked_up_in_packed_weights(symmetric: bool) -> None:
    weights = numbers(128, 70, 64, symmetric)
    ids = torch.tensor([[0, 69, 31], [32, 5, 64]])
    expected = exact_weight(weights).flatten(1)[ids]
    for backend in ("native-portable", "torch-dequantize"):
        found = int4_rows(pack_int4(weights, backend), ids)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=2**-22, atol=2**-22)
    with pytest.raises(ValueError, match="cannot read"):
        int4_rows(pack_int4(weights, "torch-int4pack"), ids)


def test_leading_dimensions_strides_and_empty_batches() -> None:
    weights, bias = numbers(96, 40, 32, False), some_bias(40)
    packed, x = native(weights), activations(2, 3, 96)
    y = int4_linear(x, packed, bias)
    assert y.shape == (2, 3, 40)
    assert torch.equal(int4_linear(x[1, 2], packed, bias), y[1, 2])
    assert torch.equal(int4_linear(x.transpose(0, 1), packed, bias), y.transpose(0, 1))
    assert int4_linear(x[:0], packed, bias).shape == (0, 3, 40)


def test_the_operator_keeps_its_promises_to_pytorch() -> None:
    assert native_reason() is None
    for symmetric in KINDS.values():
        packed = native(numbers(32, 18, 32, symmetric))
        arguments = (packed.numbers, packed.scale, packed.offset, some_bias(18), 18)
        assert_keeps_promises(torch.ops.optigpu.int4_linear, activations(2, 3, 32), *arguments)


def test_the_operator_itself_never_reads_outside_its_tensors() -> None:
    packed = native(numbers(128, 40, 64, False))
    operator, x = torch.ops.optigpu.int4_linear, activations(1, 128)
    wrong = [
        (packed.numbers[:1], packed.scale, packed.offset, 40),
        (packed.numbers[:, :15], packed.scale, packed.offset, 40),
        (packed.numbers, packed.scale[:1], packed.offset, 40),
        (packed.numbers, packed.scale[:, :0], packed.offset, 40),
        (packed.numbers, packed.scale, packed.offset[:1] if packed.offset is not None else None, 40),
        (packed.numbers, packed.scale, packed.offset, 65),
        (packed.numbers, packed.scale, packed.offset, 0),
    ]
    for numbers_, scale, offset, outputs in wrong:
        with pytest.raises(RuntimeError, match="int4_linear"):
            operator(x, numbers_, scale, offset, None, outputs)
    with pytest.raises(RuntimeError, match="int4_linear"):
        operator(x, packed.numbers, packed.scale, packed.offset, some_bias(39), 40)
    with pytest.raises(RuntimeError, match="lacks instruction set 9"):
        operator(x, packed.numbers, packed.scale, packed.offset, None, 40, 9)


# ---- Weights as numbers of 4 bits.


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
    found = exact_weight(weights).flatten(1)
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
    assert float((exact_weight(whole).flatten(1) - weight).square().sum()) < 1.02 * error(scheme)
    assert not exact_weight(whole).flatten(1)[3, :128].any()


def test_four_bits_hold_sixteen_values_exactly() -> None:
    steps = torch.arange(-8.0, 8.0).repeat(2)[None] * 0.25
    for solver in ("min_max", "hqq"):
        for symmetric in (True, False):
            scheme = Int4Scheme(32, symmetric, solver)
            assert torch.equal(dequantize_groups(quantize_groups(steps, scheme)), steps)
