"""int8_dynamic replaces what it says, and decodes as quantized weights and activations do."""

from typing import Any

import pytest
import torch

from optigpu.documents.result import Accelerator
from optigpu.hardware import probe
from optigpu.ops.linear.int8_dynamic import GROUP, MOST_INNER, TILE, int8_dynamic_backend
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.engine.decoded import assert_right
from tests.engine.rounding import (
    in_float64,
)
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_is_replaced_and_the_embedding_stays(family: str) -> None:
    plain = runtime_of(f"path:{family}").model
    layers = [place.layer for place in linear_places(plain)]

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", Int8Dynamic())
        assert linear_places(runtime.model) == []
        facts = runtime.notes.facts
        assert (facts["int8_layers"], facts["int8_backend"]) == (len(layers), int8_dynamic_backend("cpu"))
        stored = sum(b.numel() for b in runtime.model.buffers() if b.dtype is torch.uint8)
        assert stored == sum(filled(weight_of(layer)) for layer in layers)
        embedding = plain.get_input_embeddings().weight
        assert runtime.model.get_input_embeddings().weight.equal(embedding)

    assert_needs_hook(Int8Dynamic(), "modules", claim)


def filled(weight: torch.Tensor) -> int:
    """Bytes of the packed weights."""
    outputs, inner = weight.shape
    return -(-outputs // TILE) * TILE * -(-inner // GROUP) * GROUP


@pytest.mark.parametrize("family", FAMILIES)
def test_it_decodes_as_quantization_and_rounding_allow(family: str) -> None:
    reference = quantizing(in_float64(runtime_of(f"path:{family}").model))
    assert_right(runtime_of(f"path:{family}", Int8Dynamic()), reference, "float32")


@pytest.mark.slow
def test_it_decodes_with_bf16_and_within_a_compiled_step() -> None:
    reference = quantizing(in_float64(runtime_of("path:qwen2", Bf16()).model))
    assert_right(runtime_of("path:qwen2", Bf16(), Int8Dynamic()), reference, "bfloat16")
    reference = quantizing(in_float64(runtime_of("path:gpt2").model))
    assert_right(runtime_of("path:gpt2", Int8Dynamic(), TorchCompile()), reference, "float32")


def quantizing(model: Any) -> Any:
    """A float64 model whose linear layers round weights and activations, written apart from the code that is tested."""

    class Rounding(torch.nn.Module):
        def __init__(self, plain: Any) -> None:
            super().__init__()
            weight = weight_of(plain).detach().clone()
            largest = weight.abs().amax(dim=1, keepdim=True)
            scale = (largest / 127).float().double().masked_fill(largest == 0, 1)
            self.weight, self.bias = (weight / scale).round() * scale, plain.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().amax(dim=-1, keepdim=True) / 127
            return torch.nn.functional.linear((x / scale).round() * scale, self.weight, self.bias)

    for place in linear_places(model):
        place.put(Rounding(place.layer))
    return model


def test_what_cannot_be_quantized_is_refused_and_left_as_it_was() -> None:
    damaged, twice = tiny_model("gpt2"), tiny_model("gpt2")
    with torch.no_grad():
        damaged.transformer.h[1].mlp.c_fc.weight[3, 5] = torch.nan
    Int8Dynamic().modules(twice, Notes())
    wide: Any = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(MOST_INNER + 1, 1))
    refused = [
        (torch.nn.Sequential(torch.nn.LayerNorm(4)), "no linear layer"),
        (damaged, "c_fc has weights that are NaN or infinite"),
        (twice, "quantized already"),
        (wide, f"hold up to {MOST_INNER} inputs; 1 has {MOST_INNER + 1}"),
    ]
    for model, sentence in refused:
        before = [type(module) for module in model.modules()]
        with pytest.raises(UnsupportedError, match=sentence):
            Int8Dynamic().modules(model, Notes())
        assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("capability", "refused"), [("7.0", True), ("7.5", False), ("9.0", False), ("12.0", False), (None, False)]
)
def test_a_gpu_without_int8_matrix_units_is_refused(capability: str | None, refused: bool) -> None:
    technique: Technique = Int8Dynamic()
    gpu = Accelerator(name="GPU", memory_bytes=1, uuid="GPU-1", compute_capability=capability)
    environment = probe().model_copy(update={"accelerators": (gpu,)})
    reason = technique.check(environment, DeviceKind.CUDA, None)
    assert (reason is not None) == refused
    if reason:
        assert "compute capability 7.5 and GPU has 7.0" in reason
    assert technique.check(environment, DeviceKind.CPU, None) is None
    assert not technique.suits(environment, DeviceKind.CPU)
