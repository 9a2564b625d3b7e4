"""int8_dynamic's operator: exact sums on every instruction set that this CPU has, eager and compiled."""

import sys

import pytest
import torch

from optigpu.ops.linear.int8_dynamic import (
    INSTRUCTION_SETS,
    MOST_INNER,
    DynamicBackend,
    dynamic_native_reason,
    int8_dynamic,
    int8_dynamic_backend,
    pack_dynamic,
    quantize_tokens,
)
from tests.breadth import spread
from tests.engine.native_paths import assert_keeps_promises, paths_that_run
from tests.engine.test_ops_int8_linear import TYPES, activations, int8_layer

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = [  # rows, inner, outputs: whole tiles, remainders of each kind, one of everything
    (1, 768, 64),
    (1, 1, 1),
    (2, 3, 33),
    (3, 90, 37),
    (4, 128, 31),
    (5, 33, 65),
    (7, 257, 31),
    (12, 5, 100),
    (13, 78, 32),
    (25, 131, 33),
    (40, 259, 70),
]


def integers(*shape: int, seed: int) -> torch.Tensor:
    """int8 from -127 to 127, the first of each row the largest."""
    drawn = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    drawn[:, 0] = 127
    return drawn


def native_backends() -> list[DynamicBackend]:
    q, scale = torch.ones(1, 1, dtype=torch.int8), torch.ones(1)
    return paths_that_run(
        INSTRUCTION_SETS,
        dynamic_native_reason(),
        lambda number: int8_dynamic(torch.ones(1, 1), pack_dynamic(q), scale, None, number),
    )


def test_this_cpu_runs_its_best_instruction_set_by_default() -> None:
    backends = native_backends()
    assert backends[0] == "native-portable"
    assert int8_dynamic_backend("cpu") == backends[-1]


@pytest.mark.parametrize(("rows", "inner", "outputs"), spread(SHAPES, by_default=3))
def test_every_path_sums_integers_exactly(rows: int, inner: int, outputs: int) -> None:
    q, x = integers(outputs, inner, seed=inner), integers(rows, inner, seed=outputs)
    exact = x.long() @ q.long().T  # scales are 1: each row's largest is 127
    scale, packed = torch.ones(outputs), pack_dynamic(q)
    for backend in native_backends():
        y = int8_dynamic(x.float(), packed, scale, None, INSTRUCTION_SETS[backend])
        assert torch.equal(y.long(), exact), backend
    assert torch.equal(int8_dynamic(x.float(), q, scale).long(), exact)


def test_several_threads_sum_integers_exactly(several_torch_threads: None) -> None:
    for shape in SHAPES:
        test_every_path_sums_integers_exactly(*shape)


def test_without_a_compiler_torch_multiplies_the_same_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    q, scale, bias = int8_layer(90, 37)
    x = activations(3, 90)
    native = int8_dynamic(x, pack_dynamic(q), scale, bias)
    module = sys.modules[int8_dynamic.__module__]  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "dynamic_native_reason", lambda: "There is no g++.")
    assert int8_dynamic_backend("cpu") == "torch-widen"
    packed = pack_dynamic(q)
    assert torch.equal(packed, q)
    torch.testing.assert_close(int8_dynamic(x, packed, scale, bias), native)


def test_the_largest_sums_do_not_overflow() -> None:
    for sign in (1, -1):
        q = torch.full((2, MOST_INNER), 127, dtype=torch.int8)
        q[1] = -127
        x = torch.full((1, MOST_INNER), 127.0 * sign)
        for backend in native_backends():
            y = int8_dynamic(x, pack_dynamic(q), torch.ones(2), None, INSTRUCTION_SETS[backend])
            assert y.tolist() == [[sign * 127.0**2 * MOST_INNER, -sign * 127.0**2 * MOST_INNER]]


@pytest.mark.parametrize(("dtype", "rows", "inner", "outputs"), spread(TYPES, SHAPES, by_default=3), ids=str)
def test_every_path_agrees_with_float64(rows: int, inner: int, outputs: int, dtype: torch.dtype) -> None:
    """Sums are exact, so four float32 roundings and that of the result's type are all that is allowed."""
    q, scale, bias = int8_layer(inner, outputs)
    x = activations(rows, inner, dtype=dtype)
    tokens, token_scale = quantize_tokens(x)
    product = (tokens.double() @ q.double().T) * token_scale.double() * scale.double()
    exact = product + bias.double()
    allowed = 4 * 2**-24 * (product.abs() + exact.abs()) + exact.abs() * torch.finfo(dtype).eps / 2
    for backend in native_backends():
        y = int8_dynamic(x, pack_dynamic(q), scale, bias, INSTRUCTION_SETS[backend])
        assert y.dtype == dtype
        assert torch.all((y.double() - exact).abs() <= allowed), backend
    assert torch.all((int8_dynamic(x, q, scale, bias).double() - exact).abs() <= allowed)


def test_a_token_is_quantized_by_half_a_step_at_most_and_by_itself() -> None:
    x = activations(6, 50)
    x[2] *= 1000
    x[3] = 0
    q, scale = quantize_tokens(x)
    assert (q.dtype, scale.dtype, tuple(scale.shape)) == (torch.int8, torch.float32, (6, 1))
    assert torch.all((q * scale - x).abs() <= scale * 0.5001)
    assert q.abs().amax(dim=1).tolist() == [127, 127, 127, 0, 127, 127]
    assert scale[3] == 1


def test_leading_dimensions_strides_and_empty_batches() -> None:
    q, scale, bias = int8_layer(96, 40)
    packed, x = pack_dynamic(q), activations(2, 3, 96)
    y = int8_dynamic(x, packed, scale, bias)
    assert y.shape == (2, 3, 40)
    assert torch.equal(int8_dynamic(x[1, 2], packed, scale, bias), y[1, 2])  # integer sums have no order
    assert torch.equal(int8_dynamic(x.transpose(0, 1), packed, scale, bias), y.transpose(0, 1))
    assert int8_dynamic(x[:0], packed, scale, bias).shape == (0, 3, 40)


def test_rows_with_no_finite_number_with_zeros_and_with_denormals() -> None:
    q, scale, bias = int8_layer(40, 20)
    x = activations(5, 40)
    x[0, 7], x[1, 3], x[2], x[3] = torch.nan, torch.inf, 0, x[3] * 1e-44
    for backend in native_backends():
        y = int8_dynamic(x, pack_dynamic(q), scale, bias, INSTRUCTION_SETS[backend])
        assert y[0].isnan().all()
        assert not y[1].isfinite().any()
        assert torch.equal(y[2], bias)
        torch.testing.assert_close(y[3], bias)
        assert y[4].isfinite().all()


@pytest.mark.slow
def test_compiles_into_one_graph_and_keeps_its_promises_to_pytorch() -> None:
    q, scale, bias = int8_layer(64, 48)
    packed, inputs = pack_dynamic(q), [activations(1, 64, dtype=dtype) for dtype in TYPES]

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [int8_dynamic(torch.relu(x), packed, scale, bias) * 2 for x in inputs]

    with torch.inference_mode():
        torch.testing.assert_close(
            torch.compile(step, fullgraph=True, backend="aot_eager")(inputs), step(inputs)
        )
    assert_keeps_promises(torch.ops.optigpu.int8_dynamic, activations(2, 3, 64), packed, scale, bias)
    assert_keeps_promises(torch.ops.optigpu.int8_dynamic, activations(4, 64), packed, scale, None)


def test_the_operator_itself_never_reads_outside_its_tensors() -> None:
    q, scale, _ = int8_layer(32, 20)
    packed, operator = pack_dynamic(q), torch.ops.optigpu.int8_dynamic
    wrong = [(packed[:0], scale), (packed[:, :7], scale), (packed[..., :3], scale), (packed, torch.ones(33))]
    for weights, scales in wrong:
        with pytest.raises(RuntimeError, match="int8_dynamic"):
            operator(activations(1, 32), weights, scales, None)
    with pytest.raises(RuntimeError, match="lacks instruction set 9"):
        operator(activations(1, 32), packed, scale, None, 9)
