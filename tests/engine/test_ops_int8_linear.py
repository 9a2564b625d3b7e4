"""int8_linear against float64, on every instruction set that this CPU has, eager and compiled."""

import pytest
import torch

from optigpu.ops.linear.int8_linear import (
    INSTRUCTION_SETS,
    Int8Backend,
    int8_linear,
    int8_linear_backend,
    native_reason,
    pack,
    quantize_rows,
)
from tests.breadth import spread
from tests.engine.native_paths import assert_keeps_promises, assert_right, paths_that_run

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def activations(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def int8_layer(inner: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights in int8, their scales, and a bias."""
    generator = torch.Generator().manual_seed(inner * 1000 + outputs)
    q, scale = quantize_rows(torch.randn(outputs, inner, generator=generator))
    return q, scale, torch.randn(outputs, generator=generator)


SHAPES = [  # rows, inner, outputs: whole tiles, remainders of each kind, one of everything
    (1, 768, 64),
    (1, 1, 1),
    (2, 3, 17),
    (3, 91, 37),
    (4, 128, 15),
    (5, 33, 49),
    (6, 64, 16),
    (7, 257, 31),
    (12, 5, 100),
    (13, 77, 16),
    (24, 130, 33),
    (40, 259, 65),
]


def assert_close_to_exact(
    y: torch.Tensor,
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """Within the rounding of a float32 sum over `inner`, and of the type of the result."""
    exact = (x.double() @ q.double().T) * scale.double()
    size = (x.double().abs() @ q.double().abs().T) * scale.double()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    allowed = size * (x.shape[-1] + 2) * 2**-24 + exact.abs() * torch.finfo(y.dtype).eps / 2
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    assert torch.all((y.double() - exact).abs() <= allowed)


def native_backends() -> list[Int8Backend]:
    q, scale = torch.ones(1, 1, dtype=torch.int8), torch.ones(1)
    return paths_that_run(
        INSTRUCTION_SETS,
        native_reason(),
        lambda number: int8_linear(torch.ones(1, 1), pack(q), scale, None, number),
    )


def test_this_cpu_runs_its_best_instruction_set_by_default() -> None:
    backends = native_backends()
    assert backends[0] == "native-portable"
    assert int8_linear_backend("cpu") == backends[-1]


@pytest.mark.parametrize(("dtype", "rows", "inner", "outputs"), spread(TYPES, SHAPES, by_default=3), ids=str)
def test_every_instruction_set_agrees_with_float64(
    rows: int, inner: int, outputs: int, dtype: torch.dtype
) -> None:
    q, scale, bias = int8_layer(inner, outputs)
    packed, x = pack(q), activations(rows, inner, dtype=dtype)
    for backend in native_backends():
        assert_close_to_exact(
            int8_linear(x, packed, scale, bias, INSTRUCTION_SETS[backend]), x, q, scale, bias
        )
        assert_close_to_exact(int8_linear(x, packed, scale, None, INSTRUCTION_SETS[backend]), x, q, scale)


def test_several_threads_agree_with_float64(several_torch_threads: None) -> None:
    for shape in SHAPES:
        test_every_instruction_set_agrees_with_float64(*shape, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "rows", "inner", "outputs"), spread(TYPES, [*SHAPES, (3, 128, 33)], by_default=3), ids=str
)
def test_plain_torch_agrees_with_float64(rows: int, inner: int, outputs: int, dtype: torch.dtype) -> None:
    q, scale, bias = int8_layer(inner, outputs)
    x = activations(rows, inner, dtype=dtype)
    y = int8_linear(x, q, scale, bias)
    # torch's operator rounds the activations and the sums to bfloat16, so compare in that type.
    wide = x.to(torch.bfloat16) if inner % 64 == 0 else x
    exact = (wide.double() @ q.double().T) * scale.double()
    assert y.dtype == dtype
    rounding = exact.abs() * 2**-8 + (exact + bias.double()).abs() * 2**-8 + 1e-5
    assert torch.all((y.double() - exact - bias.double()).abs() <= rounding)


def test_leading_dimensions_strides_and_empty_batches() -> None:
    q, scale, bias = int8_layer(96, 40)
    packed = pack(q)
    x = activations(2, 3, 96)
    y = int8_linear(x, packed, scale, bias)
    assert y.shape == (2, 3, 40)
    # Another number of rows is summed in another order, so the last bits may differ.
    torch.testing.assert_close(int8_linear(x[1, 2], packed, scale, bias), y[1, 2])
    assert torch.equal(int8_linear(x.transpose(0, 1), packed, scale, bias), y.transpose(0, 1))
    assert int8_linear(x[:0], packed, scale, bias).shape == (0, 3, 40)


def test_the_operator_keeps_its_promises_to_pytorch() -> None:
    q, scale, bias = int8_layer(20, 18)
    assert native_reason() is None
    assert_keeps_promises(torch.ops.optigpu.int8_linear, activations(2, 3, 20), pack(q), scale, bias)
    assert_keeps_promises(torch.ops.optigpu.int8_linear, activations(4, 20), pack(q), scale, None)


def test_nan_and_infinity_are_not_hidden() -> None:
    q, scale, _ = int8_layer(40, 20)
    x = activations(2, 40)
    x[0, 7] = torch.nan
    x[1, 3] = torch.inf
    for dtype in TYPES:
        for backend in native_backends():
            y = int8_linear(x.to(dtype), pack(q), scale, None, INSTRUCTION_SETS[backend])
            assert y[0].isnan().all()
            assert not y[1].isfinite().any()


def test_quantization_is_wrong_by_half_a_step_at_most() -> None:
    weight = activations(30, 50)
    weight[4] = 0
    q, scale = quantize_rows(weight)
    assert (q.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert q.abs().amax() == 127
    assert not q[4].any()
    assert torch.all((q * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001)


def test_the_operator_itself_never_reads_outside_its_tensors() -> None:
    q, scale, _ = int8_layer(32, 20)
    operator = torch.ops.optigpu.int8_linear
    for packed, scales in [(pack(q)[:1], scale), (pack(q)[:, :31], scale), (pack(q), scale[:4])]:
        with pytest.raises(RuntimeError, match="int8_linear"):
            operator(activations(1, 32), packed, scales, None)
    with pytest.raises(RuntimeError, match="lacks instruction set 9"):
        operator(activations(1, 32), pack(q), scale, None, 9)


# ---- Triton, interpreted in a process of its own: a kernel is interpreted or not from its module's import.


INTERPRETED = """
import itertools
import torch
from optigpu.ops.launch import LaunchTarget
from optigpu.ops.linear.triton_int8 import int8_call, triton_int8_linear
from tests.engine.test_ops_int8_linear import TYPES, activations, int8_layer

def target_for(dtype):
    # Divided as on a GPU with few multiprocessors. The interpreter multiplies bfloat16 as the integers that it keeps.
    return LaunchTarget(warps=24, dp4a=True, matrix_units=dtype != torch.bfloat16)

SHAPES = [  # inner, outputs
    (770, 130), (3072, 50), (1, 1), (17, 3), (64, 770), (1, 40), (768, 1)
]
ROWS = (1, 3, 4, 17)

def assert_near(y, x, q, scale, bias):
    assert (y.dtype, y.shape) == (x.dtype, (*x.shape[:-1], q.shape[0]))
    exact, size = (x.double() @ q.double().T) * scale.double(), (x.double().abs() @ q.double().abs().T) * scale.double()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    # The interpreter cuts a float32 off to bfloat16, where a GPU rounds it.
    rounding = torch.finfo(y.dtype).eps / (1 if y.dtype == torch.bfloat16 else 2)
    allowed = size * (x.shape[-1] + 2) * 2**-24 + exact.abs() * rounding
    assert torch.all((y.double() - exact).abs() <= allowed), (x.shape, q.shape, x.dtype)

def call_of(x, q, scale, bias):
    y = torch.full((x.shape[0], q.shape[0]), torch.nan, dtype=x.dtype)
    return int8_call(x, q, scale, bias, y, target_for(x.dtype)), y

for index, ((inner, outputs), rows) in enumerate(itertools.product(SHAPES, ROWS)):
    q, scale, bias = int8_layer(inner, outputs)
    for place, dtype in enumerate(TYPES):
        x = activations(rows, inner, dtype=dtype)
        chosen = bias if (index + place) % 2 else None
        call, y = call_of(x, q, scale, chosen)
        assert call.kernel.__name__ == ("_int8_gemv" if rows <= 4 else "_int8_gemm")
        call.run()
        assert_near(y, x, q, scale, chosen)
q, scale, _ = int8_layer(40_000, 3)
call, _ = call_of(activations(1, 40_000), q, scale, None)
assert call.kernel.__name__ == "_int8_gemm"  # more inputs than registers hold

q, scale, bias = int8_layer(96, 40)
extremes = torch.full((5, 64), 127, dtype=torch.int8)
extremes[1::2] = -128
for rows in (2, 20):
    x = activations(rows, 64)
    assert_near(triton_int8_linear(x, extremes, torch.ones(5), None), x, extremes, torch.ones(5), None)
x = activations(2, 3, 96)
y = triton_int8_linear(x, q, scale, bias)
assert y.shape == (2, 3, 40)
assert torch.equal(triton_int8_linear(x.transpose(0, 1), q, scale, bias), y.transpose(0, 1))
assert triton_int8_linear(x[:0], q, scale, bias).shape == (0, 3, 40)
for rows in (2, 20):
    x = activations(rows, 96)
    x[0, 7], x[1, 3] = torch.nan, torch.inf
    y = triton_int8_linear(x, q, scale, None)
    assert y[0].isnan().all()
    assert not y[1].isfinite().any()
    assert y[2:].isfinite().all()
print("right")
"""


@pytest.mark.long
def test_the_triton_kernels_agree_with_float64() -> None:
    assert_right(INTERPRETED, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
