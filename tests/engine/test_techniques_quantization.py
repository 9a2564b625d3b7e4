"""fp16, bf16 and int8_weight_only change what they say, and their logits are off by no more than rounding explains."""

from typing import Any

import pytest

from optigpu.models.loading.footprint import weight_bytes
from optigpu.techniques.base import Technique
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import UnsupportedError
from tests.breadth import spread
from tests.engine.decoded import assert_right
from tests.engine.rounding import (
    in_float64,
)
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
HALVES = [(Bf16(), "bfloat16"), (Fp16(), "float16")]
EMBEDDING = "get_input_embeddings"


@pytest.mark.parametrize(("family", "technique", "dtype"), spread(FAMILIES, HALVES))
def test_a_half_halves_every_weight(family: str, technique: Technique, dtype: str) -> None:
    plain = weight_bytes(runtime_of(f"path:{family}").model)

    def claim() -> None:
        model = runtime_of(f"path:{family}", technique).model
        assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{dtype}"}
        assert 2 * weight_bytes(model) == pytest.approx(plain, rel=0.01)  # rotary tables stay in float32

    assert_needs_hook(technique, "load", claim)


@pytest.mark.parametrize(("family", "technique", "dtype"), spread(FAMILIES, HALVES, by_default=4))
def test_a_half_decodes_as_its_rounding_allows(family: str, technique: Technique, dtype: str) -> None:
    runtime = runtime_of(f"path:{family}", technique)
    assert_right(runtime, in_float64(runtime.model), dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_replaces_every_linear_layer_and_leaves_the_embedding(family: str) -> None:
    plain = runtime_of(f"path:{family}").model
    layers = linear_layers(plain)

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", Int8WeightOnly())
        assert linear_layers(runtime.model) == []
        assert runtime.notes.facts["int8_layers"] == len(layers)
        assert sum(buffer.numel() for buffer in int8_buffers(runtime.model)) == padded_weights(layers)
        assert getattr(runtime.model, EMBEDDING)().weight.equal(getattr(plain, EMBEDDING)().weight)

    assert_needs_hook(Int8WeightOnly(), "modules", claim)


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_counts_its_weights_scales_and_the_embedding(family: str) -> None:
    plain = runtime_of(f"path:{family}").model
    layers = linear_layers(plain)
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    gone = sum(4 * layer.weight.numel() for layer in layers)
    kept = 4 * plain.get_input_embeddings().weight.numel() if tied else 0
    scales = sum(4 * outputs_of(layer) for layer in layers)
    expected = weight_bytes(plain) - gone + kept + padded_weights(layers) + scales
    assert weight_bytes(runtime_of(f"path:{family}", Int8WeightOnly()).model) == expected


@pytest.mark.parametrize(("family", "other"), spread(FAMILIES, [None, Bf16(), Fp16()], by_default=4))
def test_int8_decodes_as_quantization_and_rounding_allow(family: str, other: Technique | None) -> None:
    others = [other] if other else []
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[other.name] if other else "float32"
    reference = in_float64(runtime_of(f"path:{family}", *others).model)
    quantize_in_place(reference)
    assert_right(runtime_of(f"path:{family}", Int8WeightOnly(), *others), reference, dtype)


def test_int8_refuses_a_model_without_linear_layers_and_leaves_it() -> None:
    import torch

    from optigpu.techniques.base import Notes

    model: Any = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.LayerNorm(4))
    with pytest.raises(UnsupportedError, match="no linear layer"):
        Int8WeightOnly().modules(model, Notes())
    assert [type(module).__name__ for module in model] == ["Embedding", "LayerNorm"]


def linear_layers(model: Any) -> list[Any]:
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    return [module for module in model.modules() if isinstance(module, (Linear, Conv1D))]


def outputs_of(layer: Any) -> int:
    return int(layer.nf if type(layer).__name__ == "Conv1D" else layer.out_features)


def int8_buffers(model: Any) -> list[Any]:
    import torch

    return [buffer for buffer in model.buffers() if buffer.dtype is torch.int8]


def padded_weights(layers: list[Any]) -> int:
    """Bytes of the packed weights; the C++ operator fills outputs up to a multiple of its tile."""
    import torch

    from optigpu.ops.linear.int8_linear import TILE, int8_linear_backend

    tile = TILE if int8_linear_backend(torch.device("cpu")).startswith("native") else 1
    return sum(
        -(-outputs_of(layer) // tile) * tile * (layer.weight.numel() // outputs_of(layer)) for layer in layers
    )


def quantize_in_place(model: Any) -> None:
    """Rounds a float64 model's linear weights to int8 and back, written apart from the code that is tested."""
    import torch

    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if tied:
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_input_embeddings().weight.clone())
    for layer in linear_layers(model):
        dim = 0 if type(layer).__name__ == "Conv1D" else 1
        with torch.no_grad():
            largest = layer.weight.abs().amax(dim=dim, keepdim=True)
            scale = (
                (largest / 127).float().double().masked_fill(largest == 0, 1)
            )  # a padding token's row is zero
            layer.weight.copy_((layer.weight / scale).round() * scale)
