"""fused_gelu, fused_swiglu and fused_qkv run fewer operators, keep each weight once, and change no output."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optigpu.hardware import probe
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import load_image_model
from optigpu.models.reference import parse_reference
from optigpu.ops.activation import fused_activation
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.kernels.fused_gelu import FusedGelu
from optigpu.techniques.kernels.fused_layernorm import FusedLayernorm
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.kernels.fused_rmsnorm import FusedRmsnorm
from optigpu.techniques.kernels.fused_swiglu import FusedSwiglu
from optigpu.techniques.memory.autocast import Autocast
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import cases, spread
from tests.engine.decoded import NEW_TOKENS, assert_right, operators
from tests.engine.rounding import in_float64
from tests.engine.test_techniques_quantization import quantize_in_place
from tests.engine.tiny_models import assert_needs_hook, biased_model, runtime_of, with_biases

pytestmark = pytest.mark.usefixtures("biased_models", "one_torch_thread")
LAYERS = 2
GATED = ("llama", "mistral", "qwen2")
ATTENDING = ("opt", "qwen2", "llama", "mistral")
FUSED: list[tuple[str, Technique]] = [
    ("gpt2", FusedGelu()),
    ("llama", FusedSwiglu()),
    ("qwen2", FusedQkv()),
    ("opt-gelu", FusedGelu()),
    ("opt", FusedQkv()),
    *((name, FusedSwiglu()) for name in ("mistral", "qwen2")),
    *((name, FusedQkv()) for name in ("llama", "mistral")),
]
BY_NAME = pytest.mark.parametrize(("name", "technique"), cases(FUSED, 5))
PRECISIONS = {"bf16": (Bf16(), "bfloat16"), "fp16": (Fp16(), "float16"), "autocast": (Autocast(), "bfloat16")}
STACKS: dict[str, list[Technique]] = {
    "dynamic": [],
    "static": [StaticKvCache()],
    "uncached": [NoKvCache()],
    "eager": [EagerAttention()],
    "eager static": [EagerAttention(), StaticKvCache()],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "of_activation"), [("gpt2", "aten::tanh"), ("opt-gelu", "aten::gelu")])
def test_fused_gelu_adds_the_bias_in_the_operator_that_computes_the_gelu(
    name: str, of_activation: str
) -> None:
    plain = operators(name)
    each = LAYERS * NEW_TOKENS

    def claim() -> None:
        fused = operators(name, FusedGelu())
        assert fused["optigpu::bias_gelu"] == plain[of_activation] == each
        assert of_activation not in fused
        assert "aten::pow" not in fused
        assert plain["aten::addmm"] - fused["aten::addmm"] == each  # products that add a bias
        assert fused["aten::mm"] - plain["aten::mm"] == each

    assert_needs_hook(FusedGelu(), "modules", claim)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(GATED))
def test_fused_swiglu_runs_one_product_and_one_operator_instead_of_four(name: str) -> None:
    plain = operators(name)
    each = LAYERS * NEW_TOKENS

    def claim() -> None:
        fused = operators(name, FusedSwiglu())
        assert fused["optigpu::swiglu"] == plain["aten::silu"] == each
        assert "aten::silu" not in fused
        assert plain["aten::linear"] - fused["aten::linear"] == each
        assert plain["aten::mul"] - fused["aten::mul"] == each

    assert_needs_hook(FusedSwiglu(), "modules", claim)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(ATTENDING))
def test_fused_qkv_runs_two_products_of_each_layer_fewer(name: str) -> None:
    plain, fewer = operators(name), 2 * LAYERS * NEW_TOKENS

    def claim() -> None:
        fused = operators(name, FusedQkv())
        assert plain["aten::linear"] - fused["aten::linear"] == fewer
        products = [found["aten::mm"] + found["aten::addmm"] for found in (plain, fused)]
        assert products[0] - products[1] == fewer

    assert_needs_hook(FusedQkv(), "modules", claim)


@pytest.mark.slow
@BY_NAME
def test_outputs_stay_what_they_were(name: str, technique: Technique) -> None:
    reference = in_float64(runtime_of(f"path:{name}").model)
    for others in ([], [NoKvCache()]):
        assert_right(runtime_of(f"path:{name}", technique, *others), reference)


@pytest.mark.parametrize(("name", "stack"), spread(ATTENDING, STACKS, by_default=5))
def test_merged_projections_go_with_every_cache_and_attention(name: str, stack: str) -> None:
    """Mistral and Qwen2 with a sliding window that the tokens outgrow."""
    reference = in_float64(runtime_of(f"path:{name}").model)
    assert_right(runtime_of(f"path:{name}", FusedQkv(), *STACKS[stack]), reference)


@pytest.mark.parametrize(
    ("name", "technique", "precision"), spread(FUSED[:3], ["bf16", "fp16", "autocast"], by_default=3)
)
def test_halves_are_computed_in_float32_and_rounded(name: str, technique: Technique, precision: str) -> None:
    """Under autocast the bias is float32 and what it is added to is not."""
    other, dtype = PRECISIONS[precision]
    reference = in_float64(runtime_of(f"path:{name}", other).model)
    assert_right(runtime_of(f"path:{name}", technique, other), reference, dtype)


@BY_NAME
def test_every_weight_is_there_once(name: str, technique: Technique) -> None:
    plain, fused = runtime_of(f"path:{name}"), runtime_of(f"path:{name}", technique)
    assert weight_bytes(fused.model) == weight_bytes(plain.model)
    counts = [sum(weight.numel() for weight in each.model.parameters()) for each in (plain, fused)]
    assert counts[0] == counts[1]
    facts = fused.notes.facts
    assert facts[f"{technique.name}_layers"] == LAYERS
    if not isinstance(technique, FusedQkv):
        assert facts["activation_backend"] == fused_activation.activation_backend("cpu")
    if isinstance(technique, FusedGelu):
        assert facts["gelu"] == ("tanh" if name == "gpt2" else "none")


@pytest.mark.parametrize(
    ("name", "technique", "merged"),
    [
        ("llama", FusedSwiglu(), ("gate_proj", "up_proj")),
        ("opt", FusedQkv(), ("q_proj", "k_proj", "v_proj")),
    ],
)
def test_the_separate_weights_are_let_go(name: str, technique: Technique, merged: tuple[str, ...]) -> None:
    model = biased_model(name)
    separate = [
        weakref.ref(weight) for path, weight in model.named_parameters() if path.split(".")[-2] in merged
    ]
    assert len(separate) == 2 * len(merged) * LAYERS
    technique.modules(model, Notes())
    assert {reference() for reference in separate} == {None}


@BY_NAME
def test_int8_quantizes_what_was_merged(name: str, technique: Technique) -> None:
    """With one scale for each output a merged matrix is quantized as its parts are."""
    plain = runtime_of(f"path:{name}", Int8WeightOnly())
    fused = runtime_of(f"path:{name}", technique, Int8WeightOnly())
    fewer = {"fused_gelu": 0, "fused_swiglu": LAYERS, "fused_qkv": 2 * LAYERS}[technique.name]
    assert plain.notes.facts["int8_layers"] - fused.notes.facts["int8_layers"] == fewer
    reference = in_float64(runtime_of(f"path:{name}").model)
    quantize_in_place(reference)
    assert_right(fused, reference)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("gpt2", [FusedGelu(), FusedLayernorm(), TorchCompile()]),
        ("opt", [FusedQkv(), TorchCompile()]),
        ("qwen2", [FusedSwiglu(), FusedQkv(), FusedRmsnorm(), TorchCompile()]),
    ],
)
def test_compiled_with_the_other_kernels_it_is_one_graph(name: str, stack: list[Technique]) -> None:
    runtime = runtime_of(f"path:{name}", *stack)
    assert_right(runtime, in_float64(runtime_of(f"path:{name}").model))
    assert (runtime.notes.facts["compiled_graphs"], runtime.notes.facts["graph_breaks"]) == (1, 0)


@pytest.mark.parametrize("technique", [FusedGelu(), FusedQkv()], ids=lambda each: each.name)
def test_an_image_classifier_s_layers_are_fused(technique: Technique) -> None:
    vit = parse_reference("preset:tiny-vit-test")
    model, notes = with_biases(load_image_model(vit, device="cpu", dtype="float32")), Notes()
    reference = in_float64(model)
    technique.modules(model, notes)
    assert notes.facts[f"{technique.name}_layers"] == LAYERS
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


def other_activation(model: Any) -> None:
    """In the last layer alone."""
    if model.config.model_type == "gpt2":
        model.transformer.h[-1].mlp.act = torch.nn.Tanh()
    else:
        model.model.layers[-1].mlp.act_fn = torch.nn.GELU()


def two_types(model: Any) -> None:
    """In the last layer alone."""
    model.model.layers[-1].mlp.up_proj.bfloat16()
    model.model.layers[-1].self_attn.v_proj.bfloat16()


def tied(model: Any) -> None:
    first, second = model.model.layers
    first.mlp.up_proj.weight = second.mlp.up_proj.weight
    first.self_attn.k_proj.weight = second.self_attn.k_proj.weight


def one_module_twice(model: Any) -> None:
    layers = model.model.layers
    layers[0].self_attn.v_proj = layers[1].self_attn.v_proj


def without_one_bias(model: Any) -> None:
    model.model.layers[-1].mlp.gate_proj.bias = None
    model.model.layers[-1].self_attn.k_proj.bias = None


@pytest.mark.parametrize(
    ("technique", "name", "change", "sentence"),
    [
        (FusedGelu(), "llama", nothing, "supports the MLPs of .*, and this llama model has none"),
        (FusedGelu(), "opt", nothing, r"needs GELU, and the activation .*activation_fn is ReLU"),
        (FusedGelu(), "gpt2", other_activation, r"transformer.h.1.mlp.act is Tanh"),
        (FusedGelu(), "gpt2", quantized, r"plain linear layers, and .*c_fc is a Int8Linear"),
        (FusedSwiglu(), "gpt2", nothing, "supports the gated MLPs of .*, and this gpt2 model has none"),
        (FusedSwiglu(), "llama", other_activation, "the activation SiLU, and model.layers.1.mlp has GELU"),
        (FusedSwiglu(), "llama", quantized, "plain torch Linear layers, and .*gate_proj is a Int8Linear"),
        (FusedSwiglu(), "qwen2", two_types, "differ in dtype, device, inputs or bias"),
        (FusedSwiglu(), "llama", without_one_bias, "differ in dtype, device, inputs or bias"),
        (FusedSwiglu(), "qwen2", tied, "layers.0.mlp.up_proj shares its weights with another layer"),
        (FusedQkv(), "gpt2", nothing, "has one matrix for queries, keys and values already"),
        (FusedQkv(), "qwen2", quantized, "plain torch Linear layers, and .*q_proj is a Int8Linear"),
        (FusedQkv(), "qwen2", merged_already, "found no attention of the family qwen2"),
        (FusedQkv(), "llama", two_types, "differ in dtype, device, inputs or bias"),
        (FusedQkv(), "llama", without_one_bias, "differ in dtype, device, inputs or bias"),
        (FusedQkv(), "llama", tied, "layers.0.self_attn.k_proj shares its weights with another layer"),
        (FusedQkv(), "llama", one_module_twice, "v_proj shares its weights with another layer"),
    ],
)
def test_what_it_cannot_replace_it_refuses_and_leaves(
    technique: Technique, name: str, change: Callable[[Any], None], sentence: str
) -> None:
    model = biased_model(name)
    change(model)
    assert_refused_and_left(technique, model, sentence)


@pytest.mark.parametrize(("name", "technique"), [("gpt2", FusedGelu()), ("llama", FusedSwiglu())])
def test_without_a_kernel_of_ours_nothing_is_fused(
    name: str, technique: Technique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_activation, "_BACKENDS", {"cpu": "torch"})
    monkeypatch.setattr(fused_activation, "native_activation_reason", lambda: "There is no g++.")
    sentence = f"{technique.name} has no kernel here. There is no g\\+\\+."
    assert_refused_and_left(technique, biased_model(name), sentence)


def assert_refused_and_left(technique: Technique, model: Any, sentence: str) -> None:
    modules = {path: type(module) for path, module in model.named_modules()}
    weights = {path: id(weight) for path, weight in model.named_parameters()}
    notes = Notes()
    with pytest.raises(UnsupportedError, match=sentence):
        technique.modules(model, notes)
    assert {path: type(module) for path, module in model.named_modules()} == modules
    assert {path: id(weight) for path, weight in model.named_parameters()} == weights
    assert not notes.facts


def test_check_knows_the_family_and_the_compiler() -> None:
    environment = probe()
    gpt2, llama = (runtime_of(f"path:{name}").facts for name in ("gpt2", "llama"))
    without = environment.model_copy(update={"compiler": None})
    for technique, right, wrong, word in [
        (FusedGelu(), gpt2, llama, "Use fused_swiglu instead"),
        (FusedSwiglu(), llama, gpt2, "needs a gated MLP, and gpt2 has none"),
        (FusedQkv(), llama, gpt2, "one matrix"),
    ]:
        assert technique.check(environment, DeviceKind.CPU, right) is None
        assert technique.check(environment, DeviceKind.CPU, None) is None
        assert word in str(technique.check(environment, DeviceKind.CPU, wrong))
        if not isinstance(technique, FusedQkv):
            assert "install g++" in str(technique.check(without, DeviceKind.CPU, right))
        assert technique.check(without, DeviceKind.CUDA, right) is None
