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
from tests.engine.linear_operands import TYPES, activations, int8_layer
from tests.engine.native_paths import paths_that_run

pytestmark = pytest.mark.usefixtures("one_torch_thread")

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


@pytest.mark.slow  # Inductor starts its compiler
def test_compiles_into_one_graph_with_the_same_result() -> None:
    q, scale, bias = int8_layer(64, 48)
    packed, inputs = pack(q), [activations(1, 64, dtype=dtype) for dtype in TYPES]

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [int8_linear(torch.relu(x), packed, scale, bias) * 2 for x in inputs]

    compiled = torch.compile(step, fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(inputs), step(inputs))


def test_the_operator_keeps_its_promises_to_pytorch() -> None:
    q, scale, bias = int8_layer(20, 18)
    operator = torch.ops.optigpu.int8_linear.default if native_reason() is None else None
    assert operator is not None
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, (activations(2, 3, 20), pack(q), scale, bias), test_utils=checks)
    torch.library.opcheck(operator, (activations(4, 20), pack(q), scale, None), test_utils=checks)


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


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (torch.zeros(3), "floating-point matrix, not float32 \\[3\\]"),
        (torch.zeros(3, 3, dtype=torch.int32), "floating-point matrix, not int32"),
        (torch.full((2, 2), torch.nan), "NaN or infinity"),
        (torch.full((2, 2), torch.inf), "NaN or infinity"),
    ],
)
def test_weights_that_cannot_be_quantized_are_refused(weight: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        quantize_rows(weight)


def test_arguments_that_do_not_fit_are_refused() -> None:
    q, scale, bias = int8_layer(32, 20)
    packed, x = pack(q), activations(1, 32)
    refused = [
        ("activations", lambda: int8_linear(x.double(), packed, scale, bias)),
        ("activations", lambda: int8_linear(torch.tensor(1.0), packed, scale, bias)),
        ("take 32 inputs; x has 31", lambda: int8_linear(x[:, :31], packed, scale, bias)),
        ("as pack", lambda: int8_linear(x, packed.float(), scale, bias)),
        ("one float32 scale", lambda: int8_linear(x, packed, scale.double(), bias)),
        ("one float32 scale", lambda: int8_linear(x, packed, scale[:16], bias)),
        ("one float32 scale", lambda: int8_linear(x, q, scale[:16], bias)),
        ("one float32 bias", lambda: int8_linear(x, packed, scale, bias[:19])),
        ("one float32 bias", lambda: int8_linear(x, packed, scale, bias.bfloat16())),
        ("int8 matrix, not float32", lambda: pack(q.float())),
    ]
    for sentence, call in refused:
        with pytest.raises(ValueError, match=sentence):
            call()


def test_the_operator_itself_never_reads_outside_its_tensors() -> None:
    q, scale, _ = int8_layer(32, 20)
    operator = torch.ops.optigpu.int8_linear
    for packed, scales in [(pack(q)[:1], scale), (pack(q)[:, :31], scale), (pack(q), scale[:4])]:
        with pytest.raises(RuntimeError, match="int8_linear"):
            operator(activations(1, 32), packed, scales, None)
    with pytest.raises(RuntimeError, match="lacks instruction set 9"):
        operator(activations(1, 32), pack(q), scale, None, 9)
