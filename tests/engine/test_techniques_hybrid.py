"""int8_hybrid holds the bytes that its table of decisions tells, and computes with the weights that they leave."""

import copy
import json
import re
from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel
from optigpu.hardware import probe
from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.linear.int8_linear import TILE, pack, quantize_rows
from optigpu.surgery.int8_layers import Int8Embedding, Int16Linear
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Notes
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.vocabulary import DeviceKind, UnsupportedError, check_document
from tests.breadth import spread
from tests.engine.decoded import assert_right
from tests.engine.rounding import (
    in_float64,
    logits_of,
)
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")


def test_sixteen_bits_are_two_int8_matrices_and_closer_than_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(37, 91, generator=generator), torch.randn(37, generator=generator)
    x = torch.randn(5, 91, generator=generator)
    layer = Int16Linear(weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    half_step = layer.low_scale.double() / 2
    assert torch.all(layer.low_scale <= weight.abs().amax(dim=1) / (2 * 126 * 127))
    allowed = x.double().abs().sum(dim=1, keepdim=True) * half_step * 1.001 + size * 95 * 2**-24
    error = (layer(x).double() - exact).abs()
    assert torch.all(error <= allowed)
    in_bfloat16 = x.double() @ weight.bfloat16().double().T + bias.double()
    assert error.max() < (in_bfloat16 - exact).abs().max() / 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_int8_table_is_looked_up_in_both_layouts(dtype: torch.dtype) -> None:
    embedding = torch.nn.Embedding(2 * TILE + 3, 20).to(dtype)
    q, scale = quantize_rows(embedding.weight)
    rows = (q.double() * scale.double()[:, None]).to(dtype)
    ids = torch.tensor([[0, 2 * TILE + 2, TILE], [TILE - 1, 5, 5]])
    layouts = [Int8Embedding(table, scale, dtype) for table in (q, pack(q))]
    for lookup in (*layouts, Int8Embedding.of(embedding)):
        found = lookup(ids)
        assert found.dtype is dtype
        torch.testing.assert_close(found, rows[ids], rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(("family", "bits"), spread(FAMILIES, [8, 4], by_default=4))
def test_the_plan_tells_every_byte_that_the_model_then_holds(family: str, bits: Any) -> None:
    plain = runtime_of(f"path:{family}").model
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", Int8Hybrid(bits=bits))
        model, facts = runtime.model, runtime.notes.facts
        assert linear_places(model) == []
        held = weight_bytes(model)
        assert sum(row["bytes"] for row in facts["hybrid_layers"]) == held
        assert facts["hybrid_share"] == round(held / weight_bytes(plain), 4)
        assert held < weight_bytes(plain) * (
            0.36 if bits == 8 else 0.3
        )  # biases and norms count in a tiny model
        shared = storages(model.get_input_embeddings()) & storages(model.get_output_embeddings())
        assert bool(shared) == tied
        check_document(facts["hybrid_layers"])
        assert len(json.dumps(facts["hybrid_layers"])) < 4000

    assert_needs_hook(Int8Hybrid(bits=bits), "modules", claim)


def storages(module: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}


@pytest.mark.parametrize(("family", "bits"), spread(FAMILIES, [8, 4], by_default=4))
def test_it_decodes_as_what_was_decided_and_rounding_allow(family: str, bits: Any) -> None:
    """Under a target that leaves room for layers of every kind."""
    technique = Int8Hybrid(bits=bits, memory_target=0.4 if bits == 8 else 0.3)
    runtime = runtime_of(f"path:{family}", technique)
    kinds = {row["kind"] for row in runtime.notes.facts["hybrid_layers"]}
    assert {"int8", "int8 + int8"} | ({"int4"} if bits == 4 else set()) <= kinds
    assert_right(runtime, as_decided(runtime_of(f"path:{family}").model, runtime), "float32")


@pytest.mark.slow
def test_it_decodes_in_bf16_and_within_a_compiled_step() -> None:
    runtime = runtime_of("path:qwen2", Bf16(), Int8Hybrid(bits=4))
    reference = as_decided(runtime_of("path:qwen2", Bf16()).model, runtime)
    assert_right(runtime, reference, "bfloat16")
    runtime = runtime_of("path:gpt2", Int8Hybrid(), TorchCompile())
    assert_right(runtime, as_decided(runtime_of("path:gpt2").model, runtime), "float32")


def as_decided(plain: Any, runtime: DecodingModel) -> Any:
    """The plain model in float64 with weights rounded as the table of decisions says, apart from the code tested."""
    reference = in_float64(plain)
    head, embedding = reference.get_output_embeddings(), reference.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(embedding.weight.clone())
    kinds: dict[str, str] = {}
    for row in runtime.notes.facts["hybrid_layers"]:
        for name in row["layer"].split(" + "):
            kinds |= dict.fromkeys(every_path(name), row["kind"])
    with torch.no_grad():
        for path, module in reference.named_modules():
            if path in kinds:
                weight = weight_of(module)
                weight.copy_(ROUNDED[kinds[path]](weight))
    return reference


def every_path(name: str) -> list[str]:
    """ "h.0,2-3.c" as ["h.0.c", "h.2.c", "h.3.c"]."""
    match = re.search(r"\.([\d,-]+)\.", name)
    if not match:
        return [name]
    ends = [[int(end) for end in part.split("-")] for part in match[1].split(",")]
    numbers = [number for end in ends for number in range(end[0], end[-1] + 1)]
    return [name.replace(match[0], f".{number}.") for number in numbers]


def in_steps(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to 127 steps of each row's largest, float64; what a number is nearest to is found out in float32."""
    weight = weight.float()
    largest = weight.abs().amax(dim=1, keepdim=True)
    scale = (largest / 127).masked_fill(largest == 0, 1)
    return (weight / scale).round().double() * scale.double()


def in_two_steps(weight: torch.Tensor) -> torch.Tensor:
    return in_steps(weight) + in_steps(weight.float() - in_steps(weight).float())


ROUNDED = {
    "int8": in_steps,
    "int8 + int8": in_two_steps,
    "int4": lambda weight: dequantize_groups(quantize_groups(weight.float(), Int4Scheme())).double(),
    "bfloat16": lambda weight: weight.bfloat16().double(),
}


@pytest.mark.parametrize(("bits", "target"), [(8, 0.26), (4, 0.16)])
def test_a_gpt2_of_some_size_meets_the_target_without_being_told(bits: Any, target: float) -> None:
    model = gpt2_of_some_size()
    before = weight_bytes(model)
    Int8Hybrid(bits=bits).modules(model, Notes())
    assert target * 0.97 < weight_bytes(model) / before <= target


def gpt2_of_some_size() -> Any:
    """10 million weights with the proportions of GPT-2, for which biases and norms count for as little."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 128, "vocab_size": 8003}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", bos_token_id=0, eos_token_id=1, **shape)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_target_that_cannot_be_met_is_refused_with_the_least_that_can(bits: Any) -> None:
    model = tiny_model("gpt2")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=f"with {bits} bits this model needs at least") as refusal:
        Int8Hybrid(bits=bits, memory_target=0.05, smoothing=0.5).modules(model, Notes())
    assert len(linear_places(model)) == 9
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())
    least = float(str(refusal.value).split("at least ")[1].split("%")[0]) / 100
    notes = Notes()
    Int8Hybrid(bits=bits, memory_target=least + 0.0001).modules(model, notes)
    assert notes.facts["hybrid_share"] <= least + 0.0001


def test_the_first_block_is_kept_only_when_asked_for() -> None:
    kept, not_kept = (
        runtime_of("path:llama", Int8Hybrid(memory_target=0.37, keep_first_block=keep)).notes.facts
        for keep in (True, False)
    )
    first = [row for row in kept["hybrid_layers"] if row["bits"] == 16 and ".0." in row["layer"]]
    assert len(first) >= 4
    assert "the first block" in first[0]["reason"]
    assert not any("first block" in row["reason"] for row in not_kept["hybrid_layers"])


def test_more_memory_means_a_smaller_error() -> None:
    plain = logits_of(runtime_of("path:gpt2").model, prompt())
    errors = [
        float((logits_of(runtime_of("path:gpt2", technique).model, prompt()) - plain).abs().mean())
        for technique in (
            Int8Hybrid(bits=4),
            Int8Hybrid(bits=4, memory_target=0.33),
            Int8Hybrid(),
            Int8Hybrid(memory_target=1),
        )
    ]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == 4


def test_what_cannot_be_quantized_is_refused_and_left_as_it_was() -> None:
    embedding, layer, twice = (tiny_model("llama") for _ in range(3))
    with torch.no_grad():
        embedding.model.embed_tokens.weight[3, 5] = torch.nan
        layer.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    Int8Dynamic().modules(twice, Notes())
    refused = [
        (embedding, "embed_tokens has weights that are NaN or infinite"),
        (layer, "up_proj has weights that are NaN or infinite"),
        (twice, "quantized already"),
    ]
    for model, sentence in refused:
        before = [type(module) for module in model.modules()]
        with pytest.raises(UnsupportedError, match=sentence):
            Int8Hybrid().modules(model, Notes())
        assert [type(module) for module in model.modules()] == before


def test_parameters_are_what_they_say() -> None:
    for wrong in ({"bits": 6}, {"memory_target": 0}, {"memory_target": 1.1}, {"smoothing": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Int8Hybrid(**wrong)
    assert not Int8Hybrid().suits(probe(), DeviceKind.CPU)
