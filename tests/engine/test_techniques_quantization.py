"""Techniques of 16, 8 and 4 bits: what they replace, what that weighs, and logits as far off as rounding explains."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel
from optigpu.documents.result import Accelerator
from optigpu.hardware import probe
from optigpu.models.described import facts_of
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import loaded_facts
from optigpu.models.reference import parse_reference
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.linear.int4_linear import TILE as INT4_TILE
from optigpu.ops.linear.int8_dynamic import GROUP as DYNAMIC_GROUP
from optigpu.ops.linear.int8_dynamic import MOST_INNER
from optigpu.ops.linear.int8_dynamic import TILE as DYNAMIC_TILE
from optigpu.ops.linear.int8_linear import TILE as INT8_TILE
from optigpu.quality.divergence import divergence
from optigpu.surgery.integer_layers import int4_bytes
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp8 import Fp8
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int4_weight_only import Int4WeightOnly
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.techniques.quantization.llm_int8 import LlmInt8
from optigpu.techniques.quantization.nf4 import Nf4
from optigpu.techniques.quantization.tf32 import Tf32
from optigpu.techniques.training.fp8_training import Fp8Training
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import cases, spread
from tests.engine.decoded import assert_right
from tests.engine.rounding import in_float64
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
Rounding = Callable[[torch.Tensor], torch.Tensor]
HALVES = [(Bf16(), "bfloat16"), (Fp16(), "float16")]
GROUP = 32


# ---- What techniques round to, written apart from the code that is tested.


def int8_rows(weight: torch.Tensor) -> torch.Tensor:
    """127 steps of each row's largest number, float64; a padding token's row is zero."""
    largest = weight.abs().amax(dim=-1, keepdim=True)
    scale = (largest / 127).float().double().masked_fill(largest == 0, 1)
    return (weight / scale).round() * scale


def int8_tokens(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale).round() * scale


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """float64 rounded to 4 bits of exponent and 3 of mantissa."""
    exponent = x.abs().clamp(min=2.0**-6).log2().floor()
    step = torch.exp2(exponent - 3)
    return (x / step).round() * step


def fp8_rows(x: torch.Tensor) -> torch.Tensor:
    """float64 [..., inner] as e4m3 numbers times one float32 scale for each row."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = (largest.float() / 448).double().masked_fill(largest == 0, 1)
    return e4m3(x / scale) * scale


def symmetric_steps(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 32 whose largest weight becomes -8 steps."""
    groups = weight.float().reshape(-1, GROUP)
    most, least = groups.amax(dim=1, keepdim=True), groups.amin(dim=1, keepdim=True)
    step = (torch.where(-least >= most, least, most) / -8).bfloat16().float()
    step[step == 0] = 1
    return ((groups / step).round().clamp(-8, 7) * step).reshape(weight.shape).double()


def steps(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 32 from their least to their largest weight in 15 steps."""
    groups = weight.float().reshape(-1, GROUP)
    most, least = groups.amax(dim=1, keepdim=True), groups.amin(dim=1, keepdim=True)
    middle = (least + (most - least) * 8 / 15).bfloat16().float()
    step = torch.maximum((most - middle) / 7, (middle - least) / 8).bfloat16().float()
    step[step == 0] = 1
    return (((groups - middle) / step).round().clamp(-8, 7) * step + middle).reshape(weight.shape).double()


def solved(weight: torch.Tensor) -> torch.Tensor:
    """As int4_weight_only's own solver rounds."""
    return dequantize_groups(quantize_groups(weight.float(), Int4Scheme())).double()


class RoundingLinear(torch.nn.Module):
    """A linear layer in float64 with rounded weights, which rounds what it is given."""

    def __init__(self, plain: Any, weights: Rounding, activations: Rounding | None) -> None:
        super().__init__()
        self.weight, self.bias = weights(weight_of(plain).detach()), plain.bias
        self._activations = activations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._activations(x) if self._activations else x
        return torch.nn.functional.linear(x, self.weight, self.bias)


def rounding(model: Any, weights: Rounding, activations: Rounding | None = None) -> Any:
    """A float64 model whose linear layers round; the embedding of a tied head stays."""
    for place in linear_places(model):
        place.put(RoundingLinear(place.layer, weights, activations))
    return model


def quantize_in_place(model: Any) -> None:
    """Rounds a float64 model's linear weights to int8 and back."""
    rounding(model, int8_rows)


# ---- fp16 and bf16.


@pytest.mark.parametrize(("family", "technique", "dtype"), spread(FAMILIES, HALVES))
def test_a_half_halves_every_weight_and_decodes_as_its_rounding_allows(
    family: str, technique: Technique, dtype: str
) -> None:
    plain = weight_bytes(runtime_of(f"path:{family}").model)

    def claim() -> None:
        model = runtime_of(f"path:{family}", technique).model
        assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{dtype}"}
        assert 2 * weight_bytes(model) == pytest.approx(plain, rel=0.01)  # rotary tables stay in float32

    assert_needs_hook(technique, "load", claim)
    runtime = runtime_of(f"path:{family}", technique)
    assert_right(runtime, in_float64(runtime.model), dtype)


# ---- What replaces every linear layer.


def int8_bytes(weight: torch.Tensor) -> int:
    outputs, inner = weight.shape
    return -(-outputs // INT8_TILE) * INT8_TILE * inner + 4 * outputs


def dynamic_bytes(weight: torch.Tensor) -> int:
    outputs, inner = weight.shape
    filled = -(-outputs // DYNAMIC_TILE) * DYNAMIC_TILE * -(-inner // DYNAMIC_GROUP) * DYNAMIC_GROUP
    return filled + 4 * outputs


def int4_tile_bytes(weight: torch.Tensor, scales: int = 2) -> int:
    outputs, inner = weight.shape
    return -(-outputs // INT4_TILE) * INT4_TILE * (inner // 2 + scales * inner // GROUP)


def fp8_bytes(weight: torch.Tensor) -> int:
    """The tiny models' sizes are multiples of what the operator takes."""
    return weight.numel() + 4 * len(weight) + 4


def asymmetric_bytes(weight: torch.Tensor) -> int:
    return int4_tile_bytes(weight, scales=4)


EVEN, UNEVEN = (Int4WeightOnly(symmetric=symmetric, solver="min_max") for symmetric in (True, False))
WHOLE: list[tuple[Technique, str, Rounding, Rounding | None, Callable[[torch.Tensor], int]]] = [
    (Int8WeightOnly(), "int8", int8_rows, None, int8_bytes),
    (Int8Dynamic(), "int8", int8_rows, int8_tokens, dynamic_bytes),
    (EVEN, "int4", symmetric_steps, None, int4_tile_bytes),
    (UNEVEN, "int4", steps, None, asymmetric_bytes),
    (Fp8(), "fp8", fp8_rows, fp8_rows, fp8_bytes),
]
"""Each with the word of its facts, what it rounds weights and activations to, and the bytes of a layer's weights."""
BY_DEFAULT = [
    ("gpt2", WHOLE[0]),
    ("llama", WHOLE[1]),
    ("opt", WHOLE[2]),
    ("llama", WHOLE[3]),
    ("qwen2", WHOLE[4]),
]
ALL = [
    *BY_DEFAULT,
    *((family, each) for family in FAMILIES for each in WHOLE if (family, each) not in BY_DEFAULT),
]


@pytest.mark.parametrize(("family", "each"), cases(ALL, len(BY_DEFAULT)))
def test_every_linear_layer_is_replaced_and_counted_and_the_embedding_stays(family: str, each: Any) -> None:
    technique, word, _, _, stored = each
    plain = runtime_of(f"path:{family}").model
    weights = [weight_of(place.layer) for place in linear_places(plain)]
    embedding = plain.get_input_embeddings().weight
    tied = plain.get_output_embeddings().weight is embedding
    gone, kept = sum(weight.nbytes for weight in weights), tied * embedding.nbytes

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", technique)
        assert linear_places(runtime.model) == []
        assert runtime.notes.facts[f"{word}_layers"] == len(weights)
        assert runtime.model.get_input_embeddings().weight.equal(embedding)
        assert weight_bytes(runtime.model) == weight_bytes(plain) - gone + kept + sum(map(stored, weights))

    assert_needs_hook(technique, "modules", claim)


@pytest.mark.parametrize(("family", "each"), cases(ALL, len(BY_DEFAULT)))
def test_it_decodes_as_quantization_and_rounding_allow(family: str, each: Any) -> None:
    technique, _, weights, activations, _ = each
    reference = rounding(in_float64(runtime_of(f"path:{family}").model), weights, activations)
    assert_right(runtime_of(f"path:{family}", technique), reference)


@pytest.mark.parametrize(
    ("technique", "weights", "activations", "half", "dtype"),
    spread(
        [
            (Int8WeightOnly(), int8_rows, None),
            (Int4WeightOnly(), solved, None),
            (Int8Dynamic(), int8_rows, int8_tokens),
        ],
        HALVES,
        by_default=3,
    ),
)
def test_it_decodes_with_activations_of_16_bits(
    technique: Technique, weights: Rounding, activations: Rounding | None, half: Technique, dtype: str
) -> None:
    reference = rounding(in_float64(runtime_of("path:qwen2", half).model), weights, activations)
    assert_right(runtime_of("path:qwen2", half, technique), reference, dtype)


@pytest.mark.long
@pytest.mark.parametrize(
    ("technique", "weights", "activations"),
    [(Int8Dynamic(), int8_rows, int8_tokens), (Int4WeightOnly(), solved, None)],
)
def test_it_decodes_within_a_compiled_step(
    technique: Technique, weights: Rounding, activations: Rounding | None
) -> None:
    reference = rounding(in_float64(runtime_of("path:gpt2").model), weights, activations)
    runtime = runtime_of("path:gpt2", technique, TorchCompile())
    assert_right(runtime, reference)
    assert runtime.notes.facts["compiled_graphs"] == 1


@pytest.mark.parametrize(
    "technique",
    [Int8WeightOnly(), Int8Dynamic(), EVEN, Int8Hybrid(), Fp8(), LlmInt8(), Nf4()],
    ids=lambda each: each.name,
)
def test_what_cannot_be_quantized_is_refused_and_left_as_it_was(technique: Technique) -> None:
    damaged, twice = tiny_model("gpt2"), tiny_model("gpt2")
    with torch.no_grad():
        damaged.transformer.h[1].mlp.c_fc.weight[3, 5] = torch.nan
    Int8Dynamic().modules(twice, Notes())
    for model, sentence in (
        (damaged, "c_fc has weights that are NaN or infinite"),
        (twice, "quantized already"),
    ):
        assert_refused(technique, model, sentence)


@pytest.mark.parametrize(
    ("technique", "layers", "sentence"),
    [
        (Int8WeightOnly(), [torch.nn.LayerNorm(4)], "no linear layer"),
        (Int8Dynamic(), [torch.nn.Linear(MOST_INNER + 1, 1)], f"hold up to {MOST_INNER} inputs; 0 has"),
        (Int4WeightOnly(), [torch.nn.Linear(40, 64)], "inputs are a multiple of 32; 0 has 40"),
        (Nf4(), [torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4)], "leaves the head as it is"),
        (LlmInt8(), [torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4)], "leaves the head as it is"),
    ],
)
def test_layers_that_it_is_not_for_are_refused(
    technique: Technique, layers: list[torch.nn.Module], sentence: str
) -> None:
    assert_refused(technique, torch.nn.Sequential(*layers), sentence)


def assert_refused(technique: Technique, model: Any, sentence: str) -> None:
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=sentence):
        technique.modules(model, Notes())
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("technique", "capability", "least"),
    [
        (Tf32(), "7.5", "8.0"),
        (Tf32(), "8.0", None),
        (Fp8(), "8.6", "8.9"),
        (Fp8(), "10.0", None),
        (Fp8Training(), "8.6", "8.9"),
        (Fp8Training(), "8.9", None),
        (Int8Dynamic(), "7.0", "7.5"),
        (Int8Dynamic(), "7.5", None),
        (Int8Dynamic(), None, None),
    ],
)
def test_an_older_gpu_is_refused_with_what_it_lacks(
    technique: Technique, capability: str | None, least: str | None
) -> None:
    gpu = Accelerator(name="GPU", memory_bytes=1, uuid="GPU-1", compute_capability=capability)
    environment = probe().model_copy(update={"accelerators": (gpu,)})
    reason = technique.check(environment, DeviceKind.CUDA, None)
    assert (reason is None) == (least is None)
    assert least is None or f"compute capability {least}" in str(reason)


# ---- int4_weight_only's own.


def test_int4_decodes_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own operator, which computes in bfloat16."""
    operators = importlib.import_module("optigpu.ops.linear.int4_linear")
    monkeypatch.setattr(operators, "native_reason", lambda: "There is no g++ on PATH.")
    plain = runtime_of("path:llama").model
    runtime = runtime_of("path:llama", Int4WeightOnly())
    assert runtime.notes.facts["int4_backend"] == "torch-int4pack"
    assert_right(runtime, rounding(in_float64(plain), solved), "bfloat16")
    stored = [each for each in runtime.model.buffers() if each.dtype in (torch.uint8, torch.bfloat16)]
    expected = sum(int4_bytes(weight_of(place.layer), Int4Scheme()) for place in linear_places(plain))
    assert sum(each.nbytes for each in stored) == expected


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_head_may_stay_as_it_is(family: str) -> None:
    plain = runtime_of(f"path:{family}").model
    runtime = runtime_of(f"path:{family}", Int4WeightOnly(head=False))
    assert [place.path for place in linear_places(runtime.model)] == ["lm_head"]
    assert runtime.notes.facts["int4_layers"] == len(linear_places(plain)) - 1
    head, embedding = runtime.model.get_output_embeddings(), runtime.model.get_input_embeddings()
    assert head.weight.equal(plain.get_output_embeddings().weight)
    assert (head.weight is embedding.weight) == (family == "gpt2")


def test_groups_that_do_not_divide_are_refused_before_anything_is_loaded() -> None:
    gpt2, llama = facts_of(parse_reference("preset:gpt2")), loaded_facts(tiny_model("llama"))
    wide, wider = Int4WeightOnly(group_size=64), Int4WeightOnly(group_size=128)
    assert wider.check(probe(), DeviceKind.CPU, gpt2) is None
    assert Int4WeightOnly().check(probe(), DeviceKind.CPU, llama) is None
    reason = wide.check(probe(), DeviceKind.CPU, llama)
    assert "a multiple of group_size 64; this model has layers with 96. Set group_size to 32." in str(reason)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", cases([True, False], 1), ids=["symmetric", "asymmetric"])
def test_the_solver_costs_less_quality_than_rounding_alone(symmetric: bool) -> None:
    """Divergence from the float model on a text that it wrote itself."""
    runtime = runtime_of("bundled:tiny")
    tokens = runtime.sample(8, 96)
    expected = logits_after_each(runtime, tokens)

    def loss(solver: Any) -> float:
        technique = Int4WeightOnly(group_size=64, symmetric=symmetric, solver=solver)
        found = logits_after_each(runtime_of("bundled:tiny", technique), tokens)
        return float(divergence(expected, found).mean())

    assert 0 < loss("hqq") < loss("min_max") < 0.05


def logits_after_each(runtime: DecodingModel, tokens: torch.Tensor) -> Any:
    with torch.no_grad():
        return runtime.model(input_ids=tokens, use_cache=False).logits[:, 8:].numpy()
