"""llm_int8 and nf4: what they replace and weigh, and how far layers and models compute from what they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.layouts import NF4_BLOCK
from optigpu.surgery.bitsandbytes_layers import Int8OutlierLinear, Nf4Linear
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.llm_int8 import LlmInt8
from optigpu.techniques.quantization.nf4 import Nf4
from optigpu.vocabulary import UnsupportedError
from tests.breadth import cases, spread
from tests.engine.decoded import assert_right, assert_right_within
from tests.engine.rounding import DRAWS, SAFETY, UNIT, in_float64, logits_of, rounding_bound
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, runtime_of

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""Dettmers et al., QLoRA, 2023, appendix E."""


def replaced_in(model: Any) -> list[Any]:
    """The linear layers of a model without its head."""
    layers = [place.layer for place in linear_places(model)]
    return [layer for layer in layers if layer is not model.get_output_embeddings()]


def twins(plain: Any, model: Any) -> list[tuple[Any, Any]]:
    """Each replaced layer, with the layer in its place in the quantized model."""
    head = plain.get_output_embeddings()
    places = [place for place in linear_places(plain) if place.layer is not head]
    return [(place.layer, model.get_submodule(place.path)) for place in places]


def dequantized(layer: Any) -> Any:
    """The weights of a layer of ours that is not packed, in float64, from its bytes: written apart from the library."""
    # The library multiplies level and statistic in float32 and rounds to the dtype that it computes in.
    statistics = layer.absmax
    if layer.nested:
        nested = layer.nested_absmax.repeat_interleave(256)[: statistics.numel()]
        statistics = layer.nested_levels[statistics.long()] * nested + layer.offset
    high, low = layer.packed.flatten() >> 4, layer.packed.flatten() & 15
    indices = torch.stack([high, low], dim=1).flatten()[: layer.shape[0] * layer.shape[1]]
    values = torch.tensor(NF4)[indices.long()] * statistics.repeat_interleave(NF4_BLOCK)[: indices.numel()]
    return values.to(layer.dtype).double().view(*layer.shape)


def rounded_to_int8(weight: Any) -> Any:
    """A float64 matrix as int8 with one scale a row, by way of float16, and back."""
    wide = weight.half().double()
    scale = wide.abs().amax(1, keepdim=True) / 127
    return (wide / scale).round() * scale


def activation_bound(reference: Any, tokens: Any, threshold: float) -> float:
    """As `rounding_bound`, for activations that are rounded to int8 before each linear layer but the head."""
    exact = logits_of(reference, tokens)
    torch.manual_seed(0)
    with _disturbed(replaced_in(reference), threshold):
        worst = max(float((logits_of(reference, tokens) - exact).abs().max()) for _ in range(DRAWS))
    return SAFETY * worst


@contextmanager
def _disturbed(layers: list[Any], threshold: float) -> Iterator[None]:
    def disturb(module: Any, inputs: tuple[Any, ...]) -> Any:
        x = inputs[0]
        outliers = (x.abs() >= threshold) if threshold > 0 else torch.zeros_like(x, dtype=torch.bool)
        step = x.masked_fill(outliers, 0).abs().amax(-1, keepdim=True) / 127
        return (x + (torch.rand_like(x) - 0.5) * step.expand_as(x).masked_fill(outliers, 0),)

    handles = [layer.register_forward_pre_hook(disturb) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
BOTH: list[Technique] = [LlmInt8(), Nf4()]
OTHERS = [(None, "float32"), (Bf16(), "bfloat16"), (Fp16(), "float16")]


@pytest.mark.parametrize(("family", "technique"), spread(FAMILIES, BOTH, by_default=2))
def test_it_replaces_every_linear_layer_but_the_head(family: str, technique: Technique) -> None:
    plain = runtime_of(f"path:{family}").model
    layers = replaced_in(plain)

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", technique)
        head = runtime.model.get_output_embeddings()
        assert [place.layer for place in linear_places(runtime.model)] == [head]
        assert head.weight.equal(plain.get_output_embeddings().weight)
        assert runtime.notes.facts[f"{technique.name.removeprefix('llm_')}_layers"] == len(layers)

    assert_needs_hook(technique, "modules", claim)


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_int8_counts_a_byte_a_weight_and_a_scale_for_each_output(family: str) -> None:
    plain = runtime_of(f"path:{family}").model
    weights = [weight_of(layer) for layer in replaced_in(plain)]
    gone = sum(4 * weight.numel() for weight in weights)
    come = sum(weight.numel() + 4 * weight.shape[0] for weight in weights)
    assert weight_bytes(runtime_of(f"path:{family}", LlmInt8()).model) == weight_bytes(plain) - gone + come


@pytest.mark.parametrize(("family", "double"), spread(FAMILIES, [True, False], by_default=2))
def test_nf4_counts_half_a_byte_a_weight_and_its_statistics(family: str, double: bool) -> None:
    plain = runtime_of(f"path:{family}").model
    come = 0
    for layer in replaced_in(plain):
        blocks = -(-layer.weight.numel() // NF4_BLOCK)
        nested = blocks + 4 * -(-blocks // 256) + 4 * 256 + 4  # their own statistics, levels and mean
        come += layer.weight.numel() // 2 + 4 * 16 + (nested if double else 4 * blocks)
    gone = sum(4 * layer.weight.numel() for layer in replaced_in(plain))
    runtime = runtime_of(f"path:{family}", Nf4(double_quantization=double))
    assert weight_bytes(runtime.model) == weight_bytes(plain) - gone + come
    assert runtime.notes.facts["nf4_fused_layers"] == 0
    assert runtime.notes.facts["nf4_double_quantized_layers"] == double * runtime.notes.facts["nf4_layers"]


@pytest.mark.parametrize(
    ("family", "beside", "double"),
    spread(FAMILIES, [(other,) for other in OTHERS], [True, False], by_default=4),
)
def test_nf4_decodes_as_its_weights_and_rounding_allow(
    family: str, beside: tuple[Technique | None, str], double: bool
) -> None:
    other, dtype = beside
    others = [other] if other else []
    runtime = runtime_of(f"path:{family}", Nf4(double_quantization=double, packing=False), *others)
    reference = in_float64(runtime_of(f"path:{family}", *others).model)
    for layer, quantized in twins(reference, runtime.model):
        weight_of(layer).copy_(dequantized(quantized))
    assert_right(runtime, reference, dtype)


@pytest.mark.parametrize(
    ("family", "beside", "threshold"),
    spread(FAMILIES, [(other,) for other in OTHERS], [6.0, 0.0], by_default=4),
)
def test_int8_decodes_as_its_weights_and_rounding_allow(
    family: str, beside: tuple[Technique | None, str], threshold: float
) -> None:
    other, dtype = beside
    others = [other] if other else []
    reference = in_float64(runtime_of(f"path:{family}", *others).model)
    for layer in replaced_in(reference):
        weight_of(layer).copy_(rounded_to_int8(weight_of(layer)))
    runtime = runtime_of(f"path:{family}", LlmInt8(threshold=threshold), *others)
    assert_right_within(
        runtime,
        reference,
        lambda tokens: (
            rounding_bound(reference, tokens, dtype) + activation_bound(reference, tokens, threshold)
        ),
    )


def test_int8_refuses_weights_beyond_float16_and_leaves_the_model() -> None:
    model = runtime_of("path:opt").model
    model.model.decoder.layers[1].fc2.weight[3, 5] = 1e5
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=r"layers\.1\.fc2 has weights beyond"):
        LlmInt8().modules(model, Notes())
    assert [type(module) for module in model.modules()] == before


# ---- Layers by themselves: against float64, and bit for bit against the library's own.


SHAPES = [(96, 64, 5), (33, 17, 3), (130, 70, 1), (17, 200, 2)]
"""Outputs, inputs and rows; of one row outliers are left out otherwise than of several."""
SHAPES_AND_THRESHOLDS = pytest.mark.parametrize(
    ("dtype", "outputs", "inputs", "rows", "threshold"), spread(UNIT, SHAPES, [6.0, 0.0], by_default=6)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs", "rows", "double"),
    spread(UNIT, [*SHAPES, (64, 96, 2), (31, 32, 3), (5, 160, 1)], [True, False], by_default=5),
)
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


def test_outliers_spoil_the_other_columns_only_without_a_threshold() -> None:
    weight, _, x = drawn(32, 1024, 5, "float32")
    x[:, 7] = 50.0
    exact = x.double() @ weight.double().T

    def error(threshold: float) -> float:
        found = Int8OutlierLinear(weight, None, threshold)(x)
        return float(torch.linalg.vector_norm(found - exact) / torch.linalg.vector_norm(exact))

    assert 5 * error(6.0) < error(0.0)


@SHAPES_AND_THRESHOLDS
def test_int8_layers_compute_what_the_library_s_own_do(
    outputs: int, inputs: int, rows: int, threshold: float, dtype: str
) -> None:
    import bitsandbytes

    weight, bias, x = drawn(outputs, inputs, rows, dtype)
    theirs = bitsandbytes.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False, threshold=threshold)
    theirs.weight = bitsandbytes.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    theirs.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    expected = theirs.eval().to("cpu")(x)
    assert Int8OutlierLinear(weight, bias, threshold)(x).equal(expected)


@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs", "rows", "double"),
    spread(UNIT, [(96, 64, 5), (34, 18, 3)], [True, False], by_default=4),
)
def test_nf4_layers_compute_what_the_library_s_own_do(
    outputs: int, inputs: int, rows: int, double: bool, dtype: str
) -> None:
    import bitsandbytes

    weight, bias, x = drawn(outputs, inputs, rows, dtype)
    options = {"compress_statistics": double, "quant_type": "nf4"}
    theirs = bitsandbytes.nn.Linear4bit(inputs, outputs, compute_dtype=weight.dtype, **options)
    theirs.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, **options)
    theirs.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    theirs = theirs.eval().to("cpu")
    for packed in (False, True):
        ours = Nf4Linear(weight, bias, double, packed)
        theirs.support_avx512bf16_for_cpu = ours.fused
        # Packed, the library keeps what double quantization cost.
        if (packed and not double) or not ours.fused:
            assert ours(x).equal(theirs(x))


def drawn(outputs: int, inputs: int, rows: int, dtype: str) -> tuple[Any, Any, Any]:
    """Weight, bias, and activations with an outlier."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, inputs)
    x[0, inputs // 2] = 20.0
    kind = getattr(torch, dtype)
    return weight.to(kind), bias.to(kind), x.to(kind)
