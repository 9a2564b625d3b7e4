"""The fused norms against float64, on every instruction set that this CPU has, eager and compiled."""

import pytest
import torch

from optigpu.ops.norm import fused_norm
from optigpu.ops.norm.fused_norm import (
    NORM_INSTRUCTION_SETS,
    NormBackend,
    add_layer_norm,
    add_rms_norm,
    native_norm_reason,
    norm_backend,
)
from tests.breadth import spread
from tests.engine.native_paths import assert_keeps_promises, assert_right, paths_that_run

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = [  # whole vectors, remainders of each kind, one of everything, several threads' rows
    (1, 1, 768),
    (1,),
    (3, 2),
    (2, 3, 17),
    (5, 31),
    (4, 64),
    (7, 259),
    (40, 1000),
]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT = 2.0**-24
"""Unit roundoff of float32, in which everything is computed."""
EPS = 1e-5


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, residual, weight and bias."""
    x, residual = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype, seed=1)
    return x, residual, drawn(shape[-1], dtype=dtype, seed=2), drawn(shape[-1], dtype=dtype, seed=3)


def native_backends() -> list[NormBackend]:
    x = torch.ones(1)
    return paths_that_run(
        NORM_INSTRUCTION_SETS, native_norm_reason(), lambda number: add_rms_norm(x, None, None, EPS, number)
    )


def assert_norm_of(
    normed: torch.Tensor,
    summed: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_rms: bool,
    rounding: float | None = None,
) -> None:
    """Within rounding of the norm of `summed` in float64; `rounding` is that of the result, half an ulp by default.

    Of sums of n terms in any order each is off by at most n u of its terms' sizes (Higham, Accuracy and Stability of
    Numerical Algorithms, 2002, section 4.2); the variance's part of that is halved by the root. A deviation from the
    mean is one subtraction and the mean's own correction, so it does not matter how large the mean is.
    """
    wide = summed.double()
    mean = torch.zeros_like(wide[..., :1]) if is_rms else wide.mean(dim=-1, keepdim=True)
    centred = wide - mean
    spread = centred.square().mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(spread + EPS)
    plain = centred * scale
    scaled = plain if weight is None else plain * weight.double()
    exact = scaled if bias is None else scaled + bias.double()
    n = summed.shape[-1]
    factor = torch.ones_like(plain) if weight is None else weight.double().abs().expand_as(plain)
    off_centre = torch.zeros_like(spread) if is_rms else (n + 3) * UNIT * centred.abs().mean(-1, keepdim=True)
    allowed = factor * (plain.abs() * (n / 2 + 8) * UNIT + off_centre * scale) + exact.abs() * 2 * UNIT
    rounding = torch.finfo(normed.dtype).eps / 2 if rounding is None else rounding
    allowed = allowed + exact.abs() * rounding + torch.finfo(normed.dtype).tiny
    assert torch.all((normed.double() - exact).abs() <= allowed)


def test_this_cpu_runs_its_best_instruction_set_by_default() -> None:
    assert norm_backend("cpu") == native_backends()[-1]


@pytest.mark.parametrize(
    ("dtype", "shape"), spread(TYPES, [(shape,) for shape in SHAPES], by_default=4), ids=str
)
def test_every_instruction_set_agrees_with_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight, bias = operands(shape, dtype)
    for backend in native_backends():
        number = NORM_INSTRUCTION_SETS[backend]
        normed, summed = add_layer_norm(x, residual, weight, bias, EPS, number)
        assert summed.equal(x + residual)
        assert (normed.dtype, normed.shape) == (dtype, x.shape)
        assert_norm_of(normed, summed, weight, bias, is_rms=False)
        normed, summed = add_rms_norm(x, residual, weight, EPS, number)
        assert summed.equal(x + residual)
        assert_norm_of(normed, summed, weight, None, is_rms=True)
        normed, same = add_layer_norm(x, None, None, None, EPS, number)
        assert same is x
        assert_norm_of(normed, x, None, None, is_rms=False)
        normed, same = add_rms_norm(x, None, None, EPS, number)
        assert same is x
        assert_norm_of(normed, x, None, None, is_rms=True)


def test_several_threads_agree_with_float64(several_torch_threads: None) -> None:
    test_every_instruction_set_agrees_with_float64(SHAPES[-1], torch.float32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_plain_torch_agrees_with_float64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused_norm._BACKENDS, "cpu", "torch")
    x, residual, weight, bias = operands((3, 259), dtype)
    normed, summed = add_layer_norm(x, residual, weight, bias, EPS)
    assert summed.equal(x + residual)
    assert_norm_of(normed, summed, weight, bias, is_rms=False)
    normed, summed = add_rms_norm(x, residual, weight, EPS)
    assert_norm_of(normed, summed, weight, None, is_rms=True)
    assert add_rms_norm(x, None, weight, EPS)[1] is x


def test_a_large_mean_costs_no_digits() -> None:
    x = 1e4 + drawn(3, 1000)
    for backend in native_backends():
        normed, _ = add_layer_norm(x, None, None, None, EPS, NORM_INSTRUCTION_SETS[backend])
        assert_norm_of(normed, x, None, None, is_rms=False)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_sums_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """Every pair of the numbers of a 16-bit type would take long: all of them, each with a few others."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).reshape(1024, 64)
    for backend in native_backends():
        for other in (0.0, 1.0, -3.1e-7, 0.1):
            residual = torch.full_like(every, other)
            summed = add_rms_norm(every, residual, None, EPS, NORM_INSTRUCTION_SETS[backend])[1]
            expected = every + residual
            finite = expected.isfinite()
            assert summed.isfinite().equal(finite)
            assert summed[finite].equal(expected[finite])
            assert summed.isnan().equal(expected.isnan())


def test_types_that_differ_are_added_and_normed_as_torch_promotes_them() -> None:
    x, residual = drawn(4, 50, dtype=torch.bfloat16), drawn(4, 50, seed=1)
    weight, bias = drawn(50, seed=2), drawn(50, seed=3)
    normed, summed = add_layer_norm(x, residual, weight, bias, EPS)
    assert (normed.dtype, summed.dtype) == (torch.float32, torch.float32)
    assert summed.equal(x + residual)
    assert_norm_of(normed, summed, weight, bias, is_rms=False)
    normed, summed = add_rms_norm(x, x, weight, EPS)
    assert (normed.dtype, summed.dtype) == (torch.float32, torch.bfloat16)
    assert_norm_of(normed, summed, weight, None, is_rms=True)


def test_strides_and_empty_batches() -> None:
    x, residual, weight, _ = operands((4, 6, 20), torch.float32)
    turned = add_rms_norm(x.transpose(0, 1), residual.transpose(0, 1), weight, EPS)
    straight = add_rms_norm(x, residual, weight, EPS)
    assert all(one.transpose(0, 1).equal(other) for one, other in zip(turned, straight, strict=True))
    assert all(part.shape == (0, 20) for part in add_rms_norm(x[0, :0], residual[0, :0], weight, EPS))


def test_nan_and_infinity_are_not_hidden() -> None:
    for dtype in TYPES:
        x = drawn(2, 40, dtype=dtype)
        x[0, 7], x[1, 39] = torch.nan, torch.inf
        for backend in native_backends():
            for normed, summed in (
                add_layer_norm(x, x, None, None, EPS, NORM_INSTRUCTION_SETS[backend]),
                add_rms_norm(x, x, None, EPS, NORM_INSTRUCTION_SETS[backend]),
            ):
                assert normed[0].isnan().all()
                assert normed[1, 39].isnan()
                assert summed.isfinite().sum() == 2 * 39


@pytest.mark.slow
def test_compiles_into_one_graph_with_the_same_result() -> None:
    cases = [operands((2, 3, 48), dtype) for dtype in TYPES]

    def step(cases: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        results = []
        for x, residual, weight, bias in cases:
            normed, summed = add_layer_norm(torch.relu(x), residual, weight, bias, EPS)
            results += [normed * 2, *add_rms_norm(summed, None, weight, EPS)]
        return results

    norm_backend("cpu")
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(cases), step(cases))


@pytest.mark.slow
def test_the_operators_keep_their_promises_to_pytorch() -> None:
    assert native_norm_reason() is None
    x, residual, weight, bias = operands((2, 3, 20), torch.float32)
    operators = torch.ops.optigpu
    assert_keeps_promises(operators.add_layer_norm, x, residual, weight, bias, EPS)
    assert_keeps_promises(operators.add_rms_norm, x, residual, weight, EPS)
    assert_keeps_promises(operators.layer_norm, x, None, None, EPS)
    assert_keeps_promises(operators.rms_norm, x, weight, EPS)


def test_the_operators_themselves_never_read_outside_their_tensors() -> None:
    x, residual, weight, bias = operands((2, 20), torch.float32)
    operators = torch.ops.optigpu
    for call in (
        lambda: operators.add_layer_norm(x, residual[:1], weight, bias, EPS),
        lambda: operators.add_layer_norm(x, residual.bfloat16(), weight, bias, EPS),
        lambda: operators.add_rms_norm(x, residual, weight[:4], EPS),
        lambda: operators.layer_norm(x, weight, bias.half(), EPS),
        lambda: operators.rms_norm(torch.tensor(1.0), None, EPS),
        lambda: operators.rms_norm(x.double(), None, EPS),
    ):
        with pytest.raises(RuntimeError, match="fused_norm"):
            call()
    with pytest.raises(RuntimeError, match="lacks instruction set 9"):
        operators.rms_norm(x, None, EPS, 9)


# ---- Triton, interpreted in a process of its own: a kernel is interpreted or not from its module's import.


INTERPRETED = """
import torch
from optigpu.ops.norm.triton_norm import triton_add_norm
from tests.engine.test_ops_fused_norm import EPS, SHAPES, TYPES, assert_norm_of, operands

def assert_right(x, residual, weight, bias, is_rms):
    normed, summed = triton_add_norm(x, residual, weight, bias, EPS, is_rms)
    # The interpreter cuts a float32 off to bfloat16, where a GPU rounds it.
    rounding = torch.finfo(x.dtype).eps / (1 if x.dtype == torch.bfloat16 else 2)
    exact = x.double() if residual is None else x.double() + residual.double()
    assert torch.all((summed.double() - exact).abs() <= exact.abs() * rounding)
    assert summed is x or residual is not None
    assert (normed.dtype, normed.shape) == (x.dtype, x.shape)
    assert_norm_of(normed, summed, weight, bias, is_rms, rounding)

for index, shape in enumerate(SHAPES[:-1]):
    for dtype in (torch.float32, TYPES[1 + index % 2]):
        x, residual, weight, bias = operands(shape, dtype)
        assert_right(x, residual, weight, bias, False)
        assert_right(x, residual, weight, None, True)
        assert_right(x, None, None, None, False)
        assert_right(x, None, weight, None, True)
x = 1e4 + operands((3, 1000), torch.float32)[0]
assert_right(x, None, None, None, False)
turned = operands((6, 20), torch.float32)[0].T
assert_right(turned, turned, None, None, True)
assert triton_add_norm(x[:0], x[:0], None, None, EPS, True)[1].shape == (0, 1000)
print("right")
"""


@pytest.mark.slow
def test_the_kernel_agrees_with_float64() -> None:
    assert_right(INTERPRETED, {"TRITON_INTERPRET": "1"})
