"""The layers of llm_int8 and nf4 by themselves: against float64, and bit for bit against the library's own."""

from typing import Any

import pytest

from optigpu.surgery.bitsandbytes_layers import Int8OutlierLinear, Nf4Linear
from tests.engine.bitsandbytes_weights import dequantized
from tests.engine.rounding import UNIT

SHAPES = [(96, 64, 5), (33, 17, 3), (130, 70, 1), (17, 200, 2)]
"""Outputs, inputs and rows; of one row outliers are left out otherwise than of several."""


@pytest.mark.parametrize("double", [True, False])
def test_large_nf4_layers_take_little_more_than_four_bits_a_weight(double: bool) -> None:
    import torch

    layer = Nf4Linear(torch.randn(1024, 4096), None, double, False)
    bits = 8 * sum(buffer.nbytes for buffer in layer.buffers()) / 2**22
    assert bits == pytest.approx(4 + (8 / 64 + 32 / 64 / 256 if double else 32 / 64), abs=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [*SHAPES, (64, 96, 2), (31, 32, 3), (5, 160, 1)])
@pytest.mark.parametrize("double", [True, False])
def test_nf4_layers_multiply_with_the_weights_that_they_hold(
    outputs: int, inputs: int, rows: int, double: bool, dtype: str
) -> None:
    """Also where blocks reach over the ends of rows, which the library's own operator does not always do."""
    weight, bias, x = drawn(outputs, inputs, rows, dtype)
    layer = Nf4Linear(weight, bias, double, False)
    held = dequantized(layer)
    assert bool(((held - weight.double()).abs() <= 0.16 * weight.double().abs().max()).all())
    exact = x.double() @ held.T + bias.double()
    size = x.double().abs() @ held.abs().T + bias.double().abs()
    found = layer(x)
    assert found.dtype == x.dtype
    assert bool(((found.double() - exact).abs() <= (inputs + 2) * UNIT[dtype] * size).all())


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("outputs", "inputs", "rows"), SHAPES)
@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_int8_layers_are_off_by_no_more_than_half_a_step_of_each_factor(
    outputs: int, inputs: int, rows: int, threshold: float, dtype: str
) -> None:
    import torch

    weight, bias, x = drawn(outputs, inputs, rows, dtype)
    layer = Int8OutlierLinear(weight, bias, threshold)
    exact = x.double() @ weight.double().T + bias.double()
    found = layer(x)
    assert found.dtype == x.dtype
    weights = half_step(weight.double(), weight.double().abs().amax(1, keepdim=True))
    outliers = ((x.abs() >= threshold) & torch.tensor(threshold > 0)).any(0)
    inner = x.double().abs().masked_fill(outliers, 0)
    activations = half_step(inner, inner.amax(1, keepdim=True)).masked_fill(outliers, 0)
    products = x.double().abs() @ weights.T + activations @ (weight.double().abs() + weights).T
    sums = (inputs + 4) * UNIT[dtype] * (x.double().abs() @ weight.double().abs().T + bias.double().abs())
    assert bool(((found.double() - exact).abs() <= products + 2 * sums).all())


def test_outliers_spoil_the_other_columns_only_without_a_threshold() -> None:
    import torch

    weight, _, x = drawn(32, 1024, 5, "float32")
    x[:, 7] = 50.0
    exact = x.double() @ weight.double().T

    def error(threshold: float) -> float:
        found = Int8OutlierLinear(weight, None, threshold)(x)
        return float(torch.linalg.vector_norm(found - exact) / torch.linalg.vector_norm(exact))

    assert 5 * error(6.0) < error(0.0)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("outputs", "inputs", "rows"), SHAPES)
@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_int8_layers_compute_what_the_library_s_own_do(
    outputs: int, inputs: int, rows: int, threshold: float, dtype: str
) -> None:
    import bitsandbytes
    import torch

    weight, bias, x = drawn(outputs, inputs, rows, dtype)
    theirs = bitsandbytes.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False, threshold=threshold)
    theirs.weight = bitsandbytes.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    theirs.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    expected = theirs.eval().to("cpu")(x)
    assert Int8OutlierLinear(weight, bias, threshold)(x).equal(expected)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(96, 64, 5), (34, 18, 3)])
@pytest.mark.parametrize("double", [True, False])
def test_nf4_layers_compute_what_the_library_s_own_do(
    outputs: int, inputs: int, rows: int, double: bool, dtype: str
) -> None:
    import bitsandbytes
    import torch

    weight, bias, x = drawn(outputs, inputs, rows, dtype)
    options = {"compress_statistics": double, "quant_type": "nf4"}
    theirs = bitsandbytes.nn.Linear4bit(inputs, outputs, compute_dtype=weight.dtype, **options)
    theirs.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, **options)
    theirs.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    theirs = theirs.eval().to("cpu")
    for packed in (False, True):
        ours = Nf4Linear(weight, bias, double, packed)
        theirs.support_avx512bf16_for_cpu = ours.fused
        if (
            packed and not double
        ) or not ours.fused:  # packed, the library keeps what double quantization cost
            assert ours(x).equal(theirs(x))


def half_step(values: Any, largest: Any) -> Any:
    """How far rounding to int8 by way of float16 moves numbers of a row whose largest magnitude is `largest`."""
    return largest / 254 * (1 + 2 * UNIT["float16"]) + 2 * UNIT["float16"] * values.abs() + 2.0**-24


def drawn(outputs: int, inputs: int, rows: int, dtype: str) -> tuple[Any, Any, Any]:
    """Weight, bias, and activations with an outlier."""
    import torch

    torch.manual_seed(0)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, inputs)
    x[0, inputs // 2] = 20.0
    kind = getattr(torch, dtype)
    return weight.to(kind), bias.to(kind), x.to(kind)
