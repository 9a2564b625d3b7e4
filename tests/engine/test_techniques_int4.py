"""int4_weight_only changes what it says, its logits are those of its weights, and its solver costs less quality."""

import importlib
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware import probe
from optigpu.models.facts import facts_of
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import loaded_facts
from optigpu.models.reference import parse_reference
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.linear.int4_linear import TILE, int4_linear_backend
from optigpu.quality.divergence import divergence
from optigpu.surgery.int4_layers import Int4Embedding, Int4Linear, int4_bytes
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int4_weight_only import Int4WeightOnly
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import spread
from tests.engine.decoded import assert_right
from tests.engine.rounding import (
    in_float64,
)
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
Rounding = Callable[[torch.Tensor], torch.Tensor]
GROUP = 32


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_is_replaced_and_the_embedding_stays(family: str) -> None:
    plain = runtime_of(f"path:{family}").model
    layers = len(linear_places(plain))

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", Int4WeightOnly())
        assert linear_places(runtime.model) == []
        facts = runtime.notes.facts
        assert (facts["int4_layers"], facts["int4_bits_per_weight"]) == (layers, 4.5)
        assert facts["int4_backend"] == int4_linear_backend("cpu", torch.float32)
        embedding = plain.get_input_embeddings().weight
        assert runtime.model.get_input_embeddings().weight.equal(embedding)

    assert_needs_hook(Int4WeightOnly(), "modules", claim)


@pytest.mark.parametrize(("family", "symmetric"), spread(FAMILIES, [True, False], by_default=4))
def test_the_memory_meter_counts_half_a_byte_a_weight_and_the_scales(family: str, symmetric: bool) -> None:
    assert int4_linear_backend("cpu", torch.float32).startswith("native")
    plain = runtime_of(f"path:{family}").model
    layers = [place.layer for place in linear_places(plain)]
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    gone = sum(4 * layer.weight.numel() for layer in layers)
    kept = 4 * plain.get_input_embeddings().weight.numel() if tied else 0
    shapes = [weight_of(layer).shape for layer in layers]
    scales = 2 if symmetric else 4
    packed = sum(filled(outputs) * (inner // 2 + scales * inner // GROUP) for outputs, inner in shapes)
    technique = Int4WeightOnly(symmetric=symmetric, solver="min_max")
    found = weight_bytes(runtime_of(f"path:{family}", technique).model)
    assert found == weight_bytes(plain) - gone + kept + packed
    scheme = Int4Scheme(symmetric=symmetric)
    assert packed == sum(int4_bytes(weight_of(layer), scheme) for layer in layers)


def filled(outputs: int) -> int:
    return -(-outputs // TILE) * TILE


@pytest.mark.parametrize(("family", "symmetric"), spread(FAMILIES, [True, False], by_default=4))
def test_it_decodes_as_rounded_weights_do(family: str, symmetric: bool) -> None:
    reference = in_float64(
        rounded(runtime_of(f"path:{family}").model, symmetric_steps if symmetric else steps)
    )
    technique = Int4WeightOnly(symmetric=symmetric, solver="min_max")
    assert_right(runtime_of(f"path:{family}", technique), reference, "float32")


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_it_decodes_as_the_weights_of_the_solver_do(group_size: Literal[32, 64], symmetric: bool) -> None:
    scheme = Int4Scheme(group_size, symmetric)
    reference = in_float64(rounded(runtime_of("path:gpt2").model, solved(scheme)))
    technique = Int4WeightOnly(group_size=group_size, symmetric=symmetric)
    assert_right(runtime_of("path:gpt2", technique), reference, "float32")


@pytest.mark.parametrize(("half", "dtype"), [(Bf16(), "bfloat16"), (Fp16(), "float16")], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_it_decodes_with_activations_of_16_bits(family: str, half: Technique, dtype: str) -> None:
    reference = in_float64(rounded(runtime_of(f"path:{family}", half).model.float(), solved(Int4Scheme())))
    assert_right(runtime_of(f"path:{family}", half, Int4WeightOnly()), reference, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_decodes_without_a_compiler(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own operator, which computes in bfloat16."""
    operators = importlib.import_module("optigpu.ops.linear.int4_linear")
    monkeypatch.setattr(operators, "native_reason", lambda: "There is no g++ on PATH.")
    reference = in_float64(rounded(runtime_of(f"path:{family}").model, solved(Int4Scheme())))
    runtime = runtime_of(f"path:{family}", Int4WeightOnly())
    assert runtime.notes.facts["int4_backend"] == "torch-int4pack"
    assert_right(runtime, reference, "bfloat16")
    layers = [weight_of(place.layer) for place in linear_places(runtime_of(f"path:{family}").model)]
    stored = [b for b in runtime.model.buffers() if b.dtype is torch.uint8]
    scales = [b for b in runtime.model.buffers() if b.dtype is torch.bfloat16]
    expected = sum(int4_bytes(weight, Int4Scheme()) for weight in layers)
    assert sum(b.numel() for b in stored) + 2 * sum(b.numel() for b in scales) == expected


@pytest.mark.parametrize("family", ["opt", "qwen2"])
def test_matrices_are_merged_before_they_are_quantized(family: str) -> None:
    reference = in_float64(rounded(runtime_of(f"path:{family}").model, solved(Int4Scheme())))
    runtime = runtime_of(f"path:{family}", Int4WeightOnly(), FusedQkv())
    apart = runtime_of(f"path:{family}", Int4WeightOnly()).notes.facts["int4_layers"]
    assert runtime.notes.facts["int4_layers"] == apart - 2 * runtime.notes.facts["fused_qkv_layers"]
    assert_right(runtime, reference, "float32")


@pytest.mark.slow
def test_a_compiled_step_gives_the_logits_of_its_weights() -> None:
    reference = in_float64(rounded(runtime_of("path:gpt2").model, solved(Int4Scheme())))
    runtime = runtime_of("path:gpt2", Int4WeightOnly(), TorchCompile())
    assert_right(runtime, reference, "float32")
    assert runtime.notes.facts["compiled_graphs"] == 1


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_head_may_stay_as_it_is(family: str) -> None:
    plain = runtime_of(f"path:{family}").model
    runtime = runtime_of(f"path:{family}", Int4WeightOnly(head=False))
    assert [place.path for place in linear_places(runtime.model)] == ["lm_head"]
    assert runtime.notes.facts["int4_layers"] == len(linear_places(plain)) - 1
    head, embedding = runtime.model.get_output_embeddings(), runtime.model.get_input_embeddings()
    assert head.weight.equal(plain.get_output_embeddings().weight)
    assert (head.weight is embedding.weight) == (family == "gpt2")


def test_an_embedding_may_share_the_table_of_a_head() -> None:
    layer = torch.nn.Linear(64, 40, bias=False)
    head = Int4Linear.of(layer, Int4Scheme(symmetric=False), readable=True)
    embedding = Int4Embedding.sharing(head, torch.bfloat16)
    ids = torch.tensor([[0, 39], [7, 31]])
    expected = dequantize_groups(quantize_groups(layer.weight, Int4Scheme(symmetric=False)))[ids]
    assert torch.equal(embedding(ids), expected.to(torch.bfloat16))
    assert weight_bytes(torch.nn.ModuleList([head, embedding])) == weight_bytes(head)


def test_what_cannot_be_quantized_is_refused_and_left_as_it_was() -> None:
    damaged, twice, other = (tiny_model("gpt2") for _ in range(3))
    with torch.no_grad():
        damaged.transformer.h[1].mlp.c_fc.weight[3, 5] = torch.nan
    Int4WeightOnly(solver="min_max").modules(twice, Notes())
    Int8WeightOnly().modules(other, Notes())
    odd = torch.nn.Sequential(torch.nn.Linear(64, 40), torch.nn.Linear(40, 64))
    refused = [
        (torch.nn.Sequential(torch.nn.LayerNorm(4)), "no linear layer"),
        (damaged, "c_fc has weights that are NaN or infinite"),
        (twice, "quantized already"),
        (other, "quantized already"),
        (odd, "inputs are a multiple of 32; 1 has 40"),
    ]
    for model, sentence in refused:
        before = [type(module) for module in model.modules()]
        with pytest.raises(UnsupportedError, match=sentence):
            Int4WeightOnly().modules(model, Notes())
        assert [type(module) for module in model.modules()] == before
    with pytest.raises(UnsupportedError, match=r"inputs are a multiple of 128; .* has 64"):
        runtime_of("path:gpt2", Int4WeightOnly(group_size=128))


def test_groups_that_do_not_divide_are_refused_before_anything_is_loaded() -> None:
    def reason(group_size: Literal[32, 64, 128], facts: ModelFacts | None) -> str | None:
        return Int4WeightOnly(group_size=group_size).check(probe(), DeviceKind.CPU, facts)

    gpt2, llama = facts_of(parse_reference("preset:gpt2")), loaded_facts(tiny_model("llama"))
    assert [reason(size, gpt2) for size in (32, 64, 128)] == [None] * 3
    assert reason(128, None) is None
    assert reason(32, llama) is None
    assert "a multiple of group_size 64; this model has layers with 96. Set group_size to 32." in str(
        reason(64, llama)
    )


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_the_solver_costs_less_quality_than_rounding_alone(symmetric: bool) -> None:
    """Divergence from the float model on a text that it wrote itself."""
    runtime = runtime_of("bundled:tiny")
    tokens = runtime.sample(8, 96)
    expected = logits_after_each(runtime, tokens)

    def loss(solver: Literal["min_max", "hqq"]) -> float:
        technique = Int4WeightOnly(group_size=64, symmetric=symmetric, solver=solver)
        found = logits_after_each(runtime_of("bundled:tiny", technique), tokens)
        return float(divergence(expected, found).mean())

    assert 0 < loss("hqq") < loss("min_max") < 0.05


def logits_after_each(runtime: DecodingModel, tokens: torch.Tensor) -> Any:
    with torch.no_grad():
        return runtime.model(input_ids=tokens, use_cache=False).logits[:, 8:].numpy()


def rounded(model: Any, rounding: Rounding) -> Any:
    """The model with the linear weights rounded; the embedding of a tied head stays."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(embedding.weight.clone())
    with torch.no_grad():
        for place in linear_places(model):
            weight_of(place.layer).copy_(rounding(weight_of(place.layer)))
    return model


def solved(scheme: Int4Scheme) -> Rounding:
    return lambda weight: dequantize_groups(quantize_groups(weight, scheme))


def symmetric_steps(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 32 whose largest weight becomes -8 steps, written apart from the code that is tested."""
    groups = weight.reshape(-1, GROUP)
    most, least = groups.amax(dim=1, keepdim=True), groups.amin(dim=1, keepdim=True)
    step = (torch.where(-least >= most, least, most) / -8).bfloat16().float()
    step[step == 0] = 1  # a padding token's row is zero
    return ((groups / step).round().clamp(-8, 7) * step).reshape(weight.shape)


def steps(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 32 from their least to their largest weight in 15 steps, written apart from the code that is tested."""
    groups = weight.reshape(-1, GROUP)
    most, least = groups.amax(dim=1, keepdim=True), groups.amin(dim=1, keepdim=True)
    middle = (least + (most - least) * 8 / 15).bfloat16().float()
    step = torch.maximum((most - middle) / 7, (middle - least) / 8).bfloat16().float()
    step[step == 0] = 1
    return (((groups - middle) / step).round().clamp(-8, 7) * step + middle).reshape(weight.shape)
