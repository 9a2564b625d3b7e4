"""bias_gelu and swiglu against float64, on every instruction set that this CPU has and in plain torch."""

import math
from collections.abc import Callable

import pytest
import torch

from optigpu.ops.activation import fused_activation
from optigpu.ops.activation.fused_activation import (
    ACTIVATION_INSTRUCTION_SETS,
    ActivationBackend,
    Approximation,
    activation_backend,
    activation_reason,
    bias_gelu,
    native_activation_reason,
    swiglu,
)
from tests.breadth import spread
from tests.engine.native_paths import assert_keeps_promises, assert_right, paths_that_run

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = [  # single elements, whole vectors and remainders of each kind, whole blocks of 512 and remainders
    (1, 1),
    (3, 17),
    (2, 3, 33),
    (5, 64),
    (1, 511),
    (2, 512),
    (3, 1030),
    (40, 1500),
]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS: tuple[Approximation, ...] = ("none", "tanh")
UNIT = 2.0**-24
LEAST = 2.0**-149
Bounds = tuple[torch.Tensor, torch.Tensor]
"""What is exact, and how far float32 arithmetic may be from it."""


def exact_gelu(value: torch.Tensor, approximate: str) -> Bounds:
    """As fused_activation.h promises. Not torch's float64 GELU, whose tail is lost in a difference from one."""
    v = value.double()
    if approximate == "none":
        exact = v * 0.5 * torch.erfc(-v / math.sqrt(2))
        return exact, 12 * UNIT * exact.abs() + v.abs() * LEAST
    s = 2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
    exact = v * torch.sigmoid(s)
    return exact, 4 * (1 + s.abs()) * UNIT * exact.abs() + v.abs() * LEAST


def exact_swiglu(value: torch.Tensor) -> Bounds:
    gate, up = value.double().chunk(2, dim=-1)
    exact = gate * torch.sigmoid(gate) * up
    return exact, 6 * UNIT * exact.abs() + (gate.abs() + 1) * up.abs() * LEAST


def assert_within(y: torch.Tensor, bounds: Bounds) -> None:
    """And within the rounding of the type of the result, at least half of its smallest number."""
    exact, arithmetic = bounds
    info = torch.finfo(y.dtype)
    allowed = arithmetic + exact.abs() * info.eps / 2 + info.smallest_normal * info.eps / 2
    fits = exact.abs() <= info.max
    assert y.shape == exact.shape
    assert torch.all(((y.double() - exact).abs() <= allowed)[fits])


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * 4).to(dtype)


def summed(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In float32, where the operators add."""
    return x.float() if bias is None else x.float() + bias.float()


def native_backends() -> list[ActivationBackend]:
    x = torch.ones(1)
    return paths_that_run(
        ACTIVATION_INSTRUCTION_SETS,
        native_activation_reason(),
        lambda number: bias_gelu(x, instruction_set=number),
    )


@pytest.fixture(params=ACTIVATION_INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> int:
    """Each that this CPU has; what it lacks, another machine tests."""
    backends = native_backends()
    return ACTIVATION_INSTRUCTION_SETS[request.param if request.param in backends else backends[-1]]


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(fused_activation, "_BACKENDS", {"cpu": "torch"})


def test_this_cpu_runs_its_best_instruction_set_by_default() -> None:
    backends = native_backends()
    assert backends[0] == "native-portable"
    assert activation_backend("cpu") == backends[-1]
    assert activation_reason("cpu") is None


@pytest.mark.parametrize(
    ("dtype", "shape"), spread(TYPES, [(shape,) for shape in SHAPES], by_default=3), ids=str
)
def test_every_instruction_set_agrees_with_float64(
    shape: tuple[int, ...], dtype: torch.dtype, instruction_set: int
) -> None:
    x, pairs = normal(*shape, dtype=dtype), normal(*shape[:-1], 2 * shape[-1], dtype=dtype)
    for bias_type in (dtype, torch.float32, None):
        bias, two = (
            normal(row.shape[-1], dtype=bias_type, seed=1) if bias_type else None for row in (x, pairs)
        )
        for form in FORMS:
            y = bias_gelu(x, bias, form, instruction_set)
            assert y.dtype == dtype
            assert_within(y, exact_gelu(summed(x, bias), form))
        y = swiglu(pairs, two, instruction_set)
        assert y.dtype == dtype
        assert_within(y, exact_swiglu(summed(pairs, two)))


def test_several_threads_agree_with_float64(several_torch_threads: None, instruction_set: int) -> None:
    test_every_instruction_set_agrees_with_float64(SHAPES[-1], torch.float32, instruction_set)


def test_errors_are_bounded_over_all_floats(instruction_set: int) -> None:
    """Denormals and huge numbers as often as others: the bits are drawn, and not the numbers."""
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    anywhere = anywhere.view(torch.float32)
    usual = torch.empty(200_000).uniform_(-120, 120, generator=generator)
    x = torch.cat([anywhere[anywhere.isfinite()], usual, usual / 10, torch.tensor([0.0, -0.0])])
    for form in FORMS:
        assert_within(bias_gelu(x, None, form, instruction_set), exact_gelu(x, form))
    up = torch.empty_like(x).uniform_(-2, 2, generator=generator)
    pairs = torch.stack([x, up], dim=-1)
    assert_within(swiglu(pairs, None, instruction_set), exact_swiglu(pairs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_is_read_and_rounded_as_torch_does(
    dtype: torch.dtype, instruction_set: int
) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for form in FORMS:
        expected = bias_gelu(every.float(), None, form, instruction_set).to(dtype)
        torch.testing.assert_close(
            bias_gelu(every, None, form, instruction_set), expected, rtol=0, atol=0, equal_nan=True
        )


def test_nan_and_infinity_are_what_torch_makes_of_them(instruction_set: int) -> None:
    """torch's in float64; its vectorized float32 GELU of infinity is NaN."""
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-45, 1.0])
    ones = torch.ones_like(x)
    functional = torch.nn.functional
    silu = functional.silu(x.double())
    pairs = [
        (bias_gelu(x, None, "none", instruction_set), functional.gelu(x.double())),
        (bias_gelu(x, None, "tanh", instruction_set), functional.gelu(x.double(), approximate="tanh")),
        (swiglu(torch.cat([x, ones]), None, instruction_set), silu),
        (swiglu(torch.cat([ones, x]), None, instruction_set), x.double() * silu[-1]),
    ]
    for y, expected in pairs:
        torch.testing.assert_close(y, expected.float(), equal_nan=True, rtol=1e-6, atol=1e-6)
        assert torch.equal(y.signbit() & ~y.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize(
    ("dtype", "shape"), spread(TYPES, [(shape,) for shape in SHAPES], by_default=3), ids=str
)
def test_plain_torch_agrees_with_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, bias = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    for form in FORMS:
        v = summed(x, bias)
        exact, _ = exact_gelu(v, form)
        y = bias_gelu(x, bias, form)
        assert y.dtype == dtype
        # torch's tail is what is left of a difference from one, and so as wrong as one is; the error function itself
        # is wrong by up to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
        assert_within(y, (exact, (1.5e-7 / 2 + 4 * UNIT) * v.double().abs()))
    pairs, two = normal(*shape[:-1], 2 * shape[-1], dtype=dtype), normal(2 * shape[-1], dtype=dtype, seed=1)
    exact, _ = exact_swiglu(summed(pairs, two))
    assert_within(swiglu(pairs, two), (exact, 8 * UNIT * exact.abs()))


def test_strides_and_empty_batches() -> None:
    x, bias = normal(4, 6, 40), normal(40, seed=1)
    assert torch.equal(bias_gelu(x.transpose(0, 1), bias), bias_gelu(x, bias).transpose(0, 1))
    assert torch.equal(swiglu(x[..., ::2], bias[::2]), swiglu(x[..., ::2].clone(), bias[::2].clone()))
    assert bias_gelu(x[:0], bias).shape == (0, 6, 40)
    assert swiglu(x[:, :0], bias).shape == (4, 0, 20)
    assert swiglu(x[0, 0], bias).shape == (20,)


@pytest.mark.parametrize("bias", [None, torch.ones(20)], ids=["without a bias", "with a bias"])
def test_the_operators_keep_their_promises_to_pytorch(bias: torch.Tensor | None) -> None:
    assert activation_backend("cpu") != "torch"
    assert_keeps_promises(torch.ops.optigpu.bias_gelu, normal(2, 3, 20), bias, True)
    assert_keeps_promises(torch.ops.optigpu.swiglu, normal(2, 3, 20), bias)


def test_the_operators_themselves_never_read_outside_their_tensors() -> None:
    assert activation_backend("cpu") != "torch"
    x, operators = normal(2, 32), torch.ops.optigpu
    refused: list[tuple[str, Callable[[], torch.Tensor]]] = [
        ("bias must be", lambda: operators.bias_gelu(x, normal(31), True)),
        ("bias must be", lambda: operators.swiglu(x, normal(16))),
        ("must be even: gate and up", lambda: operators.swiglu(x[:, :31], None)),
        ("x must be float32", lambda: operators.bias_gelu(x.double(), None, False)),
        ("lacks instruction set 9", lambda: operators.bias_gelu(x, None, False, 9)),
    ]
    for sentence, call in refused:
        with pytest.raises(RuntimeError, match=sentence):
            call()


# ---- Triton, interpreted in a process of its own: a kernel is interpreted or not from its module's import.


INTERPRETED = """
import torch
from optigpu.ops.activation.triton_activation import triton_bias_gelu, triton_swiglu
from tests.engine.test_ops_fused_activation import (
    FORMS, TYPES, UNIT, assert_within, exact_gelu, exact_swiglu, normal, summed
)

def assert_computed(x, pairs, bias, two):
    # The interpreter cuts a float32 off to bfloat16, where a GPU rounds it.
    cut = torch.finfo(x.dtype).eps if x.dtype == torch.bfloat16 else 0.0
    v = summed(x, bias)
    for form in FORMS:
        y = triton_bias_gelu(x, bias, form == "tanh")
        exact, _ = exact_gelu(v, form)
        assert y.dtype == x.dtype
        # erf's tail is what is left of a difference from one.
        assert_within(y, (exact, 4 * UNIT * v.double().abs() + cut * exact.abs()))
    exact, arithmetic = exact_swiglu(summed(pairs, two))
    assert_within(triton_swiglu(pairs, two), (exact, arithmetic + cut * exact.abs()))

for index, shape in enumerate([(1, 1), (3, 17), (2, 2, 1030)]):
    for place, dtype in enumerate(TYPES):
        x, pairs = normal(*shape, dtype=dtype), normal(*shape[:-1], 2 * shape[-1], dtype=dtype)
        biases = [normal(r.shape[-1], dtype=dtype, seed=1) for r in (x, pairs)]
        assert_computed(x, pairs, *(biases if (index + place) % 2 == 0 else (None, None)))
assert triton_bias_gelu(normal(0, 4), None, True).shape == (0, 4)
assert triton_swiglu(normal(0, 4), None).shape == (0, 2)
print("right")
"""


@pytest.mark.long
def test_the_triton_kernels_agree_with_float64() -> None:
    assert_right(INTERPRETED, {"TRITON_INTERPRET": "1"})
