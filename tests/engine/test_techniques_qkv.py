"""fused_qkv runs one product instead of three, keeps each weight once, and changes nothing that comes out."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from optigpu.hardware import probe
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import load_image_model
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.memory.autocast import Autocast
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import spread
from tests.engine.biased_models import (
    biased_model,
    operators,
    with_biases,
)
from tests.engine.decoded import NEW_TOKENS, assert_right
from tests.engine.rounding import in_float64
from tests.engine.test_techniques_quantization import quantize_in_place
from tests.engine.tiny_models import assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("biased_models", "one_torch_thread")
LAYERS = 2
THREE = ("q_proj", "k_proj", "v_proj")
FAMILIES = ("llama", "mistral", "opt", "qwen2")
STACKS: dict[str, list[Technique]] = {
    "dynamic": [],
    "static": [StaticKvCache()],
    "uncached": [NoKvCache()],
    "eager": [EagerAttention()],
    "eager static": [EagerAttention(), StaticKvCache()],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_it_runs_two_products_of_each_layer_fewer(name: str) -> None:
    plain, fewer = operators(name), 2 * LAYERS * NEW_TOKENS

    def claim() -> None:
        fused = operators(name, FusedQkv())
        assert plain["aten::linear"] - fused["aten::linear"] == fewer
        products = [found["aten::mm"] + found["aten::addmm"] for found in (plain, fused)]
        assert products[0] - products[1] == fewer

    assert_needs_hook(FusedQkv(), "modules", claim)


@pytest.mark.parametrize(("name", "stack"), spread(FAMILIES, STACKS, by_default=5))
def test_outputs_stay_what_they_were(name: str, stack: str) -> None:
    """Mistral and Qwen2 with a sliding window that the tokens outgrow."""
    reference = in_float64(runtime_of(f"path:{name}").model)
    assert_right(runtime_of(f"path:{name}", FusedQkv(), *STACKS[stack]), reference)


@pytest.mark.parametrize("other", [Bf16(), Autocast()], ids=lambda technique: technique.name)
@pytest.mark.parametrize("name", ["opt", "qwen2"])
def test_outputs_in_bfloat16_are_as_right_as_its_rounding_allows(name: str, other: Technique) -> None:
    reference = in_float64(runtime_of(f"path:{name}", other).model)
    assert_right(runtime_of(f"path:{name}", FusedQkv(), other), reference, "bfloat16")


def test_another_cache_gets_the_same_keys_and_values() -> None:
    """One that quantizes them, so that it must be their own keys and values bit for bit."""
    plain = runtime_of("path:llama", Int8KvCache())
    fused = runtime_of("path:llama", FusedQkv(), Int8KvCache())
    tokens = plain.generate(prompt(), NEW_TOKENS).tokens
    assert tokens.equal(fused.generate(prompt(), NEW_TOKENS).tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_is_there_once(name: str) -> None:
    plain, fused = runtime_of(f"path:{name}"), runtime_of(f"path:{name}", FusedQkv())
    assert weight_bytes(fused.model) == weight_bytes(plain.model)
    assert sum(p.numel() for p in fused.model.parameters()) == sum(
        p.numel() for p in plain.model.parameters()
    )
    assert fused.notes.facts["fused_qkv_layers"] == LAYERS


@pytest.mark.parametrize("name", FAMILIES)
def test_the_separate_weights_are_let_go(name: str) -> None:
    model = biased_model(name)
    separate = [
        weakref.ref(weight) for path, weight in model.named_parameters() if path.split(".")[-2] in THREE
    ]
    assert len(separate) == (3 if name == "mistral" else 6) * LAYERS
    FusedQkv().modules(model, Notes())
    assert {reference() for reference in separate} == {None}


@pytest.mark.parametrize("name", FAMILIES)
def test_int8_quantizes_what_was_merged(name: str) -> None:
    """With one scale for each output a merged matrix is quantized as its parts are."""
    plain = runtime_of(f"path:{name}", Int8WeightOnly())
    fused = runtime_of(f"path:{name}", FusedQkv(), Int8WeightOnly())
    assert plain.notes.facts["int8_layers"] - fused.notes.facts["int8_layers"] == 2 * LAYERS
    reference = in_float64(runtime_of(f"path:{name}").model)
    quantize_in_place(reference)
    assert_right(fused, reference)


@pytest.mark.slow
def test_compiled_it_is_one_graph() -> None:
    """OPT; Qwen2's is compiled together with the other kernels in test_techniques_activations.py."""
    runtime = runtime_of("path:opt", FusedQkv(), TorchCompile())
    assert_right(runtime, in_float64(runtime_of("path:opt").model))
    assert (runtime.notes.facts["compiled_graphs"], runtime.notes.facts["graph_breaks"]) == (1, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_attention_weights_can_still_be_asked_for(name: str) -> None:
    import torch

    plain, fused = (runtime_of(f"path:{name}", EagerAttention(), *more).model for more in ([], [FusedQkv()]))
    with torch.no_grad():
        expected, given = (model(prompt(), output_attentions=True).attentions for model in (plain, fused))
    assert len(given) == LAYERS
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_an_image_classifier_s_projections_are_merged() -> None:
    import torch

    vit = parse_reference("preset:tiny-vit-test")
    model, notes = with_biases(load_image_model(vit, device="cpu", dtype="float32")), Notes()
    reference = in_float64(model)
    FusedQkv().modules(model, notes)
    assert notes.facts["fused_qkv_layers"] == LAYERS
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        given, exact = model(images).logits, reference(images.double()).logits
    torch.testing.assert_close(given.double(), exact, rtol=1e-5, atol=1e-5)


def nothing(model: Any) -> None:
    """As it is."""


def quantized(model: Any) -> None:
    Int8WeightOnly().modules(model, Notes())


def merged_already(model: Any) -> None:
    FusedQkv().modules(model, Notes())


def two_types(model: Any) -> None:
    """In the last layer alone."""
    model.model.layers[-1].self_attn.v_proj.bfloat16()


def without_one_bias(model: Any) -> None:
    model.model.layers[-1].self_attn.k_proj.bias = None


def tied(model: Any) -> None:
    layers = model.model.layers
    layers[0].self_attn.k_proj.weight = layers[1].self_attn.k_proj.weight


def one_module_twice(model: Any) -> None:
    layers = model.model.layers
    layers[0].self_attn.v_proj = layers[1].self_attn.v_proj


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("gpt2", nothing, "the attention of gpt2 has one matrix for queries, keys and values already"),
        ("qwen2", quantized, "plain torch Linear layers, and .*layers.0.self_attn.q_proj is a Int8Linear"),
        ("qwen2", merged_already, "found no attention of the family qwen2"),
        ("llama", two_types, "differ in dtype, device, inputs or bias"),
        ("llama", without_one_bias, "differ in dtype, device, inputs or bias"),
        ("llama", tied, "layers.0.self_attn.k_proj shares its weights with another layer"),
        ("llama", one_module_twice, "layers.0.self_attn.v_proj shares its weights with another layer"),
    ],
)
def test_what_it_cannot_merge_it_refuses_and_leaves(
    name: str, change: Callable[[Any], None], sentence: str
) -> None:
    model = biased_model(name)
    change(model)
    modules = {path: type(module) for path, module in model.named_modules()}
    weights = {path: id(weight) for path, weight in model.named_parameters()}
    notes = Notes()
    with pytest.raises(UnsupportedError, match=sentence):
        FusedQkv().modules(model, notes)
    assert {path: type(module) for path, module in model.named_modules()} == modules
    assert {path: id(weight) for path, weight in model.named_parameters()} == weights
    assert not notes.facts


def test_check_knows_the_family() -> None:
    environment, technique = probe(), FusedQkv()
    for name in FAMILIES:
        facts = runtime_of(f"path:{name}").facts
        assert technique.check(environment, DeviceKind.CPU, facts) is None
    assert technique.check(environment, DeviceKind.CUDA, None) is None
    assert "one matrix" in str(technique.check(environment, DeviceKind.CPU, runtime_of("path:gpt2").facts))
    assert not technique.suits(environment, DeviceKind.CPU)
