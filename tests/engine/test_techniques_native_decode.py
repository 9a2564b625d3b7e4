"""native_decode packs what it says and decodes by its operator."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from optigpu.hardware import probe
from optigpu.models.described import facts_of
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import loaded_facts
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.decoder import CpuDecoder, best_instruction_set
from optigpu.ops.decode.cpu.packing import ROWS, pack, unpack
from optigpu.ops.decode.cuda.packing import joined, pack_for_cuda, unpack_from_cuda
from optigpu.ops.decode.program import WEIGHT_KINDS, CacheKind, Program, WeightKind
from optigpu.ops.layouts import decode_bytes
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Technique
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear, share
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.prefill import Prefill
from tests.breadth import cases, spread
from tests.engine.decoder_models import configured, decoder_of, packed
from tests.engine.image_models import asked_to_pass, prefill_runtime
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
FAMILIES_AND_KINDS = pytest.mark.parametrize(("family", "kind"), spread(FAMILIES, WEIGHT_KINDS, by_default=4))
PLAIN = NativeDecode(weights="w4", calibration="none")
WIDE = {"hidden_size": 128, "intermediate_size": 256}
POSITIONS = {"gpt2": "transformer.wpe", "opt": "model.decoder.embed_positions"}
"""Where the families have them that learn them."""


def bits_per_weight(places: Sequence[Any], kind: WeightKind, group: int) -> float:
    """A number, its share of a scale of 8 bits, and that of a unit of 16."""
    if kind == "bf16":
        return 16
    shapes = [weight_of(place.layer).shape for place in places]
    units = 16 * sum(outputs for outputs, _ in shapes) / sum(outputs * inputs for outputs, inputs in shapes)
    return int(kind[1]) + 8 / group + float(units)


def finer_bytes_of(model: Any) -> int:
    """Of what the head's finer rows have."""
    finer = model.get_output_embeddings().finer
    return 0 if finer is None else sum(tensor.nbytes for tensor in finer.buffers())


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_every_linear_layer_is_packed(family: str) -> None:
    layers = linear_places(tiny_model(family))

    def claim() -> None:
        model, notes = packed(tiny_model(family))
        assert linear_places(model) == []
        for place in layers:
            matrix = model.get_submodule(place.path).matrix
            expected = unpack(pack(weight_of(place.layer), None, "w4", 32))
            assert (matrix.kind, matrix.group) == ("w4", 32)
            assert unpack(replace(matrix, finer=None)).equal(expected)
            assert matrix.numbers.untyped_storage().nbytes() == notes.facts["decode_bytes"]
        numbers = sum(weight_of(place.layer).numel() for place in layers)
        bits = bits_per_weight(layers, "w4", 32) + 8 * finer_bytes_of(model) / numbers
        assert notes.facts["decode_bits_per_weight"] == pytest.approx(bits, rel=1e-3)
        assert sum(row["layers"] for row in notes.facts["decode_layers"]) == len(layers)

    assert_needs_hook(PLAIN, "modules", claim)


TABLES: dict[WeightKind, WeightKind] = {kind: "bf16" if kind == "bf16" else "w8" for kind in WEIGHT_KINDS}
"""How tables are stored that are only looked up, by the kind of the weights."""


@FAMILIES_AND_KINDS
def test_a_tied_embedding_is_the_head_and_another_is_packed_for_itself(family: str, kind: WeightKind) -> None:
    plain = tiny_model(family)
    model, _ = packed(tiny_model(family), NativeDecode(calibration="none", weights=kind))
    program, weight = attached(model), plain.get_input_embeddings().weight
    if plain.get_output_embeddings().weight is weight:
        assert program.embedding.numbers is program.head.numbers
    else:
        assert unpack(program.embedding).equal(unpack(pack(weight, None, TABLES[kind], 32)))
    assert model.get_input_embeddings().weight.equal(unpack(program.embedding))


@pytest.mark.parametrize(("kind", "group"), spread(WEIGHT_KINDS, [32, 64, 128], by_default=5))
def test_weights_and_group_are_what_was_asked_for(kind: WeightKind, group: Any) -> None:
    model, notes = packed(
        configured("llama", **WIDE), NativeDecode(calibration="none", weights=kind, group=group)
    )
    plain = configured("llama", **WIDE)
    for place in linear_places(plain):
        found = unpack(model.get_submodule(place.path).matrix)
        assert found.equal(unpack(pack(weight_of(place.layer), None, kind, group)))
    bits = bits_per_weight(linear_places(plain), kind, group)
    assert notes.facts["decode_bits_per_weight"] == pytest.approx(bits, rel=1e-2)
    assert notes.facts["decode_operator"] == f"native-{best_instruction_set()}"


@FAMILIES_AND_KINDS
def test_the_memory_meter_counts_what_is_packed(family: str, kind: WeightKind) -> None:
    plain = tiny_model(family)
    model, notes = packed(tiny_model(family), NativeDecode(calibration="none", weights=kind))
    layers: list[Any] = [place.layer for place in linear_places(plain)]
    embedding = plain.get_input_embeddings().weight
    gone = sum(4 * layer.weight.numel() for layer in layers if layer.weight is not embedding)
    gone += sum(4 * layer.bias.numel() for layer in layers if layer.bias is not None)
    biases = [-(-layer.bias.numel() // ROWS) * ROWS for layer in layers if layer.bias is not None]
    tables = [plain.get_submodule(POSITIONS[family]).weight[-64:]] if family in POSITIONS else []
    gone += sum(each.untyped_storage().nbytes() for each in (embedding, *tables))
    if plain.get_output_embeddings().weight is not embedding:
        tables.append(embedding)
    looked_up = sum(
        decode_bytes(table.shape[0], table.shape[1], DeviceKind.CPU, kind=TABLES[kind], group=32)
        for table in tables
    )
    kept = weight_bytes(plain) - gone
    assert weight_bytes(model) == kept + 4 * sum(biases) + looked_up + notes.facts["decode_bytes"]


@pytest.mark.parametrize(("family", "dtype"), spread(FAMILIES, [Bf16(), Fp16()], by_default=2))
def test_weights_that_came_in_16_bits_are_quantized_from_there(family: str, dtype: Technique) -> None:
    """As if float32 weights with the same numbers had come; and the copies in float32 are counted."""
    loaded = runtime_of(f"path:{family}", dtype).model
    expected, _ = packed(copy.deepcopy(loaded).float())
    runtime = runtime_of(f"path:{family}", dtype, PLAIN)
    assert runtime.model.dtype == loaded.dtype
    assert runtime.model(input_ids=prompt(), use_cache=False).logits.dtype == loaded.dtype
    tokens = runtime.generate(prompt(), 6).tokens
    assert tokens.equal(decoded(decoder_of(expected), prompt(), 6))
    tensors = [*attached_floats(attached(runtime.model))]
    held = {
        each.untyped_storage().data_ptr() for each in [*runtime.model.parameters(), *runtime.model.buffers()]
    }
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= held


@pytest.mark.parametrize(("family", "kv"), spread(FAMILIES, ["bf16", "int8", "int4"], by_default=4))
def test_it_decodes_by_its_operator(family: str, kv: CacheKind) -> None:
    technique = NativeDecode(weights="w4", calibration="none", kv=kv)

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", technique, InferenceMode())
        calls: list[Any] = []
        runtime.model.register_forward_pre_hook(lambda *_: calls.append(1))
        tokens = runtime.generate(prompt(), 20).tokens
        assert calls == []
        assert tokens.equal(runtime.generate(prompt(), 20).tokens)
        assert tokens.equal(decoded(decoder_of(runtime.model, kv), prompt(), 20))
        facts = runtime.notes.facts
        heads = runtime.facts.layers * runtime.facts.kv_heads
        assert (facts["decode_loop"], facts["kv_cache"]) == ("native operator", "native")
        assert facts["attn_implementation"] == "native operator"
        assert facts["kv_cache_bytes_per_token"] == 2 * heads * {"bf16": 32, "int8": 20, "int4": 12}[kv]

    assert_needs_hook(technique, "loop", claim)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_prompt_goes_through_its_operator(batch: int) -> None:
    def claim() -> None:
        runtime = prefill_runtime("path:qwen2", PLAIN)
        calls: list[Any] = []
        runtime.model.register_forward_pre_hook(lambda *_: calls.append(1))
        passed = runtime.forward(prompt(batch))
        assert calls == []
        decoder = decoder_of(runtime.model)
        decoder.begin(batch, 8)
        assert passed.logits.equal(decoder.extend(prompt(batch)))
        assert runtime.notes.facts["kv_cache"] == "native"
        assert (
            Prefill(prompt_tokens=8, batch_size=batch).prepare(asked_to_pass(runtime)).check().problem is None
        )

    assert_needs_hook(PLAIN, "forward", claim)


@pytest.mark.parametrize("prefill", [0, 5])
def test_quality_is_that_of_the_step_that_is_timed(prefill: int) -> None:
    runtime = runtime_of("path:llama", PLAIN)
    tokens = prompt(2, 12)
    found = list(runtime.score(tokens, prefill))
    decoder = decoder_of(runtime.model)
    decoder.begin(2, 12)
    if prefill:
        decoder.extend(tokens[:, :prefill])
    for index, logits in enumerate(found, start=prefill):
        assert logits.equal(decoder.extend(tokens[:, index : index + 1]))
    assert len(found) == 12 - prefill
    chosen = runtime.generate(tokens, 1).tokens[:, 0]
    assert next(iter(runtime.score(tokens, 11))).argmax(1).equal(chosen)


def test_check_knows_the_family_the_groups_the_cache_and_the_compiler() -> None:
    here, tiny = probe().model_copy(update={"compiler": "g++ 12"}), loaded_facts(tiny_model("llama"))
    bare = here.model_copy(update={"compiler": None})
    for model in ("gpt2", "opt-125m", "llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b"):
        facts = facts_of(parse_reference(f"preset:{model}"))
        assert PLAIN.check(here, DeviceKind.CPU, facts) is None
    wide = NativeDecode(weights="w4", calibration="none", group=128)
    assert "inputs are a multiple of 128" in str(wide.check(here, DeviceKind.CPU, tiny))
    other = replace(tiny, family="bloom")
    assert "nemotron, not bloom" in str(PLAIN.check(here, DeviceKind.CPU, other))
    assert "none was found; install g++" in str(PLAIN.check(bare, DeviceKind.CPU, tiny))
    assert PLAIN.check(bare, DeviceKind.CUDA, None) is None
    reason = NativeDecode(weights="w4", kv="int4").check(here, DeviceKind.CUDA, None)
    assert reason == "native_decode has kv int4 on a CPU alone; use int8 or bf16 on cuda."


def test_extra_bytes_for_what_has_no_finer_kind_are_refused() -> None:
    with pytest.raises(ValidationError, match="leave it out, or set weights to w3k, w4"):
        NativeDecode(extra_bytes=0.1, weights="w8")


@pytest.mark.parametrize("kinds", [("w4", "w4", "w4"), ("w4", "w8", "bf16"), ("w5", "w5", "w6")])
def test_layers_hold_their_parts_of_joined_matrices(kinds: tuple[WeightKind, ...]) -> None:
    weights = [torch.randn(outputs, 64) for outputs in (24, 8, 8)]
    biases = [None, torch.ones(8), None]
    matrices = [pack_for_cuda(*parts, 32) for parts in zip(weights, biases, kinds, strict=True)]
    layers = [DecodeLinear(matrix) for matrix in matrices]
    together = joined(matrices)
    share(layers, together)
    storages = {matrix.numbers.untyped_storage().data_ptr() for matrix in together}
    for layer, matrix in zip(layers, matrices, strict=True):
        assert layer.numbers.untyped_storage().data_ptr() in storages
        assert unpack_from_cuda(layer.matrix).equal(unpack_from_cuda(matrix))
        bias = torch.zeros(layer.outputs) if matrix.bias is None else matrix.bias
        assert not bias.any() if layer.bias is None else layer.bias.equal(bias)


def decoded(decoder: CpuDecoder, given: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy tokens, one call each."""
    decoder.begin(given.shape[0], given.shape[1] + new_tokens)
    found = [decoder.extend(given).argmax(1, keepdim=True)]
    for _ in range(new_tokens - 1):
        found.append(decoder.extend(found[-1]).argmax(1, keepdim=True))
    return torch.cat(found, dim=1)


def attached_floats(program: Program) -> list[torch.Tensor]:
    pairs = [(block.first, block.second) for block in program.blocks]
    norms = [program.final, *(norm for pair in pairs for norm in pair if norm)]
    return [norm.weight for norm in norms] + [norm.bias for norm in norms if norm.bias is not None]


# ---- Weights that are kept.
