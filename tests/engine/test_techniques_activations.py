"""fused_gelu and fused_swiglu run fewer operators, keep each weight once, and change nothing that comes out."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from optigpu.hardware import probe
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import load_image_model
from optigpu.models.reference import parse_reference
from optigpu.ops.activation import fused_activation
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.fused_gelu import FusedGelu
from optigpu.techniques.kernels.fused_layernorm import FusedLayernorm
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.kernels.fused_rmsnorm import FusedRmsnorm
from optigpu.techniques.kernels.fused_swiglu import FusedSwiglu
from optigpu.techniques.memory.autocast import Autocast
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.engine.biased_models import biased_model, operators, with_biases
from tests.engine.decoded import NEW_TOKENS, assert_right
from tests.engine.rounding import in_float64
from tests.engine.test_techniques_quantization import quantize_in_place
from tests.engine.tiny_models import assert_needs_hook, runtime_of

pytestmark = pytest.mark.usefixtures("biased_models", "one_torch_thread")
LAYERS = 2
GELU = ("gpt2", "opt-gelu")
GATED = ("llama", "mistral", "qwen2")
FUSED: list[tuple[str, Technique]] = [(name, FusedGelu()) for name in GELU] + [
    (name, FusedSwiglu()) for name in GATED
]
BY_NAME = pytest.mark.parametrize(("name", "technique"), FUSED, ids=[name for name, _ in FUSED])
PRECISIONS = {"bf16": (Bf16(), "bfloat16"), "fp16": (Fp16(), "float16"), "autocast": (Autocast(), "bfloat16")}


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


@pytest.mark.parametrize("name", GATED)
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


@BY_NAME
def test_outputs_stay_what_they_were(name: str, technique: Technique) -> None:
    reference = in_float64(runtime_of(f"path:{name}").model)
    for others in ([], [NoKvCache()]):
        assert_right(runtime_of(f"path:{name}", technique, *others), reference)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "technique"), [("gpt2", FusedGelu()), ("llama", FusedSwiglu())])
def test_halves_are_computed_in_float32_and_rounded(name: str, technique: Technique, precision: str) -> None:
    """Under autocast the bias is float32 and what it is added to is not."""
    other, dtype = PRECISIONS[precision]
    reference = in_float64(runtime_of(f"path:{name}", other).model)
    assert_right(runtime_of(f"path:{name}", technique, other), reference, dtype)


@BY_NAME
def test_every_weight_is_there_once(name: str, technique: Technique) -> None:
    plain, fused = runtime_of(f"path:{name}"), runtime_of(f"path:{name}", technique)
    assert weight_bytes(fused.model) == weight_bytes(plain.model)
    assert sum(p.numel() for p in fused.model.parameters()) == sum(
        p.numel() for p in plain.model.parameters()
    )
    assert fused.notes.facts[f"{technique.name}_layers"] == LAYERS
    assert fused.notes.facts["activation_backend"] == fused_activation.activation_backend("cpu")


def test_the_separate_weights_are_let_go() -> None:
    model = biased_model("llama")
    separate = [
        weakref.ref(weight)
        for path, weight in model.named_parameters()
        if path.split(".")[-2] in ("gate_proj", "up_proj")
    ]
    assert len(separate) == 4 * LAYERS
    FusedSwiglu().modules(model, Notes())
    assert {reference() for reference in separate} == {None}


def test_what_kind_of_gelu_it_is_is_recorded() -> None:
    forms = [runtime_of(f"path:{name}", FusedGelu()).notes.facts["gelu"] for name in GELU]
    assert forms == ["tanh", "none"]


@BY_NAME
def test_int8_quantizes_what_was_merged(name: str, technique: Technique) -> None:
    """With one scale for each output a merged matrix is quantized as its parts are."""
    plain = runtime_of(f"path:{name}", Int8WeightOnly())
    fused = runtime_of(f"path:{name}", technique, Int8WeightOnly())
    merged = 0 if isinstance(technique, FusedGelu) else LAYERS
    assert plain.notes.facts["int8_layers"] - fused.notes.facts["int8_layers"] == merged
    reference = in_float64(runtime_of(f"path:{name}").model)
    quantize_in_place(reference)
    assert_right(fused, reference)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("gpt2", [FusedGelu(), FusedLayernorm(), TorchCompile()]),
        ("qwen2", [FusedSwiglu(), FusedQkv(), FusedRmsnorm(), TorchCompile()]),
    ],
)
def test_compiled_with_the_other_kernels_it_is_one_graph(name: str, stack: list[Technique]) -> None:
    runtime = runtime_of(f"path:{name}", *stack)
    assert_right(runtime, in_float64(runtime_of(f"path:{name}").model))
    assert (runtime.notes.facts["compiled_graphs"], runtime.notes.facts["graph_breaks"]) == (1, 0)


def test_an_image_classifier_s_gelu_is_fused() -> None:
    import torch

    vit = parse_reference("preset:tiny-vit-test")
    model, notes = with_biases(load_image_model(vit, device="cpu", dtype="float32")), Notes()
    reference = in_float64(model)
    FusedGelu().modules(model, notes)
    assert notes.facts["fused_gelu_layers"] == LAYERS
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            model(images).logits.double(), reference(images.double()).logits, rtol=1e-5, atol=1e-5
        )


def quantized(model: Any) -> None:
    Int8WeightOnly().modules(model, Notes())


def other_activation(model: Any) -> None:
    """In the last layer alone."""
    import torch

    if model.config.model_type == "gpt2":
        model.transformer.h[-1].mlp.act = torch.nn.Tanh()
    else:
        model.model.layers[-1].mlp.act_fn = torch.nn.GELU()


def two_types(model: Any) -> None:
    model.model.layers[-1].mlp.up_proj.bfloat16()


def tied(model: Any) -> None:
    layers = model.model.layers
    layers[0].mlp.up_proj.weight = layers[1].mlp.up_proj.weight


def without_one_bias(model: Any) -> None:
    model.model.layers[-1].mlp.gate_proj.bias = None


def nothing(model: Any) -> None:
    """As it is."""


@pytest.mark.parametrize(
    ("technique", "name", "change", "sentence"),
    [
        (
            FusedGelu(),
            "llama",
            nothing,
            "supports the MLPs of GPT-2, GPT-J, OPT, ViT, and this llama model has none",
        ),
        (
            FusedGelu(),
            "opt",
            nothing,
            r"needs GELU, and the activation model.decoder.layers.0.activation_fn is ReLU",
        ),
        (FusedGelu(), "gpt2", other_activation, r"transformer.h.1.mlp.act is Tanh"),
        (
            FusedGelu(),
            "gpt2",
            quantized,
            r"plain linear layers, and transformer.h.0.mlp.c_fc is a Int8Linear",
        ),
        (
            FusedSwiglu(),
            "gpt2",
            nothing,
            "supports the gated MLPs of Llama, Mistral, Qwen2, and this gpt2 model has none",
        ),
        (
            FusedSwiglu(),
            "llama",
            other_activation,
            "needs the activation SiLU, and model.layers.1.mlp has GELU",
        ),
        (FusedSwiglu(), "llama", quantized, "plain torch Linear layers, and .*gate_proj is a Int8Linear"),
        (FusedSwiglu(), "qwen2", two_types, "differ in dtype, device, inputs or bias"),
        (FusedSwiglu(), "llama", without_one_bias, "differ in dtype, device, inputs or bias"),
        (FusedSwiglu(), "qwen2", tied, "layers.0.mlp.up_proj shares its weights with another layer"),
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
    ]:
        assert technique.check(environment, DeviceKind.CPU, right) is None
        assert technique.check(environment, DeviceKind.CPU, None) is None
        assert word in str(technique.check(environment, DeviceKind.CPU, wrong))
        assert "install g++" in str(technique.check(without, DeviceKind.CPU, right))
        assert technique.check(without, DeviceKind.CUDA, right) is None
        assert not technique.suits(environment, DeviceKind.CPU)
