"""native_decode packs what it says and decodes by its operator."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.models.facts import facts_of
from optigpu.models.loading.footprint import footprint_of, weight_bytes
from optigpu.models.loading.load import load_model, loaded_facts
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.decoder import CpuDecoder, best_instruction_set
from optigpu.ops.decode.cpu.packing import ROWS, pack, unpack
from optigpu.ops.decode.cuda.packing import joined, pack_for_cuda, unpack_from_cuda
from optigpu.ops.decode.program import CacheKind, Program, WeightKind
from optigpu.ops.layouts import decode_bytes
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Notes, Technique, conflict_between
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear, share
from optigpu.techniques.decoding.native_decode.packed_store import BOUND
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.sparsity.magnitude_pruning import MagnitudePruning
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from optigpu.workloads.generate import Generate
from optigpu.workloads.prefill import Prefill
from tests.breadth import cases, spread
from tests.engine.decoder_models import configured, decoder_of, packed
from tests.engine.divergences import divergence_of
from tests.engine.image_models import asked_to_pass, prefill_runtime
from tests.engine.tiny_models import FAMILIES, asked, assert_needs_hook, prompt, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
KINDS: tuple[WeightKind, ...] = ("w3k", "w4", "w4k", "w8", "bf16")
WIDE = {"hidden_size": 128, "intermediate_size": 256}
POSITIONS = {"gpt2": "transformer.wpe", "opt": "model.decoder.embed_positions"}
"""Where the families have them that learn them."""


def bits_per_weight(places: Sequence[Any], kind: WeightKind, group: int) -> float:
    """A number, its share of a scale of 8 bits, and that of a unit of 16."""
    if kind == "bf16":
        return 16
    shapes = [weight_of(place.layer).shape for place in places]
    units = 16 * sum(outputs for outputs, _ in shapes) / sum(outputs * inputs for outputs, inputs in shapes)
    return {"w3k": 3, "w4": 4, "w4k": 4, "w8": 8}[kind] + 8 / group + float(units)


def finer_bytes_of(model: Any) -> int:
    """Of what the head's finer rows have."""
    finer = model.get_output_embeddings().finer
    return 0 if finer is None else sum(tensor.nbytes for tensor in finer.buffers())


@pytest.mark.parametrize("family", FAMILIES)
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

    assert_needs_hook(NativeDecode(calibration="none"), "modules", claim)


TABLES: dict[WeightKind, WeightKind] = {"w3k": "w8", "w4": "w8", "w4k": "w8", "w8": "w8", "bf16": "bf16"}
"""How tables are stored that are only looked up, by the kind of the weights."""


@pytest.mark.parametrize(("family", "kind"), spread(FAMILIES, KINDS, by_default=5))
def test_a_tied_embedding_is_the_head_and_another_is_packed_for_itself(family: str, kind: WeightKind) -> None:
    plain = tiny_model(family)
    model, _ = packed(tiny_model(family), NativeDecode(calibration="none", weights=kind))
    program, weight = attached(model), plain.get_input_embeddings().weight
    if plain.get_output_embeddings().weight is weight:
        assert program.embedding.numbers is program.head.numbers
    else:
        assert unpack(program.embedding).equal(unpack(pack(weight, None, TABLES[kind], 32)))
    assert model.get_input_embeddings().weight.equal(unpack(program.embedding))


@pytest.mark.parametrize(("family", "kind"), spread(FAMILIES, KINDS, by_default=5))
def test_positions_are_packed_where_there_are_any(family: str, kind: WeightKind) -> None:
    plain = tiny_model(family)
    model, _ = packed(tiny_model(family), NativeDecode(calibration="none", weights=kind))
    positions = attached(model).positions
    assert (positions is None) == (family not in POSITIONS)
    if positions is not None:
        used = slice(-64, None)  # OPT's first two rows are no position's
        weight = plain.get_submodule(POSITIONS[family]).weight[used]
        assert unpack(positions).equal(unpack(pack(weight, None, TABLES[kind], 32)))
        assert model.get_submodule(POSITIONS[family]).weight[used].equal(unpack(positions))


@pytest.mark.parametrize(("kind", "group"), spread(KINDS, [32, 64, 128], by_default=5))
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


@pytest.mark.parametrize("head", ["w8", "bf16"])
def test_the_head_may_be_kept_in_more_bits(head: Any) -> None:
    model, _ = packed(tiny_model("gpt2"), NativeDecode(calibration="none", head=head))
    program = attached(model)
    assert program.head.kind == head
    assert {matrix.kind for block in program.blocks for matrix in (*block.qkv, block.up)} == {"w4"}
    assert attached(packed(tiny_model("gpt2"))[0]).head.kind == "w4"
    assert (
        attached(packed(tiny_model("gpt2"), NativeDecode(calibration="none", weights="w8"))[0]).head.kind
        == "w8"
    )


@pytest.mark.parametrize(("family", "kind"), spread(FAMILIES, KINDS, by_default=5))
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_what_is_packed_and_one_block_of_each_table(family: str) -> None:
    plain = tiny_model(family)
    model, notes = packed(tiny_model(family))
    footprint = footprint_of(model, loaded_facts(plain))
    # Of 16 rows, which lie together: numbers, scales and units.
    block = 16 * (64 + 64 // 32 + 2)
    assert footprint.row_bytes == (0 if family == "qwen2" else block)
    assert notes.facts["decode_bytes"] < footprint.streamed_bytes < 1.2 * notes.facts["decode_bytes"]


@pytest.mark.parametrize("dtype", [Bf16(), Fp16()], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_came_in_16_bits_are_quantized_from_there(family: str, dtype: Technique) -> None:
    """As if float32 weights with the same numbers had come; and the copies in float32 are counted."""
    loaded = runtime_of(f"path:{family}", dtype).model
    expected, _ = packed(copy.deepcopy(loaded).float())
    runtime = runtime_of(f"path:{family}", dtype, NativeDecode(calibration="none"))
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
    technique = NativeDecode(calibration="none", kv=kv)

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
        runtime = prefill_runtime("path:qwen2", NativeDecode(calibration="none"))
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

    assert_needs_hook(NativeDecode(calibration="none"), "forward", claim)


@pytest.mark.parametrize("prefill", [0, 5])
def test_quality_is_that_of_the_step_that_is_timed(prefill: int) -> None:
    runtime = runtime_of("path:llama", NativeDecode(calibration="none"))
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


def test_tokens_of_one_call_share_a_mark_and_have_no_times_of_their_own() -> None:
    one, many = (
        runtime_of("path:opt", NativeDecode(calibration="none", tokens_at_once=count)) for count in (1, 6)
    )
    assert one.generate(prompt(), 16).tokens.equal(many.generate(prompt(), 16).tokens)
    gaps = many.generate(prompt(), 16).gaps_s
    assert [index for index, gap in enumerate(gaps) if gap > 0] == [0, 1, 7, 13]
    for runtime, expected in ((one, {"token_s": 15}), (many, {"pass_s": 3})):
        request = Generate(prompt_tokens=8, new_tokens=16).prepare(asked(runtime))
        request.run()
        assert {name: len(values) for name, values in request.described().items()} == expected
        assert request.check().problem is None


def test_it_goes_with_what_changes_weights_before() -> None:
    pruned = runtime_of(
        "path:llama", MagnitudePruning(sparsity=0.9), NativeDecode(calibration="none", weights="w8")
    )
    zeros = [
        float((unpack(matrix) == 0).float().mean())
        for block in attached(pruned.model).blocks
        for matrix in block.qkv
    ]
    assert min(zeros) == pytest.approx(0.9, abs=1e-3)
    assert pruned.generate(prompt(), 4).tokens.shape == (2, 4)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, kind in TECHNIQUES.items()
        if "torch" in kind.backends and set(kind.tasks) & set(NativeDecode.tasks)
    ],
)
def test_it_excludes_what_would_not_run(name: str) -> None:
    goes = {
        "bf16",
        "fp16",
        "tf32",
        "inference_mode",
        "magnitude_pruning",
        "smaller_model",
        "speculative_decoding",
    }
    assert (conflict_between(NativeDecode, TECHNIQUES[name]) is None) == (name in goes)


def test_bfloat16_weights_have_no_groups_that_must_divide() -> None:
    model, _ = packed(
        configured("llama", intermediate_size=40), NativeDecode(calibration="none", weights="bf16")
    )
    assert attached(model).blocks[0].down.inputs == 40
    with pytest.raises(UnsupportedError, match=r"a multiple of 32; .*down_proj has 40"):
        NativeDecode(calibration="none", weights="bf16", head="w8").modules(
            configured("llama", intermediate_size=40), Notes()
        )


def test_check_knows_the_family_the_groups_and_the_compiler() -> None:
    def reason(
        model: str, technique: NativeDecode | None = None, compiler: str | None = "g++ 12"
    ) -> str | None:
        environment = probe().model_copy(update={"compiler": compiler})
        facts = facts_of(parse_reference(model))
        return (technique or NativeDecode(calibration="none")).check(environment, DeviceKind.CPU, facts)

    for model in ("gpt2", "opt-125m", "llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b"):
        assert reason(f"preset:{model}") is None
    assert "does not divide" not in str(
        reason("preset:llama-3.2-1b", NativeDecode(calibration="none", group=128))
    )
    assert "inputs are a multiple of 128" in str(
        NativeDecode(calibration="none", group=128).check(
            probe(), DeviceKind.CPU, loaded_facts(tiny_model("llama"))
        )
    )
    assert "mistral, qwen2, not smollm3" in str(
        NativeDecode(calibration="none").check(
            probe(), DeviceKind.CPU, with_family(loaded_facts(tiny_model("llama")), "smollm3")
        )
    )
    assert "none was found; install g++" in str(reason("preset:gpt2", compiler=None))
    environment = probe().model_copy(update={"compiler": None})
    assert NativeDecode(calibration="none").check(environment, DeviceKind.CUDA, None) is None
    assert not NativeDecode(calibration="none").suits(environment, DeviceKind.CUDA)


@pytest.mark.parametrize("weights", KINDS)
def test_cuda_has_the_same_weights_and_two_of_the_caches(weights: WeightKind) -> None:
    environment = probe()
    assert NativeDecode(weights=weights).check(environment, DeviceKind.CUDA, None) is None
    reason = NativeDecode(weights=weights, kv="int4").check(environment, DeviceKind.CUDA, None)
    assert reason == "native_decode has kv int4 on a CPU alone; use int8 or bf16 on cuda."


def with_family(facts: Any, family: str) -> Any:
    return replace(facts, family=family)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"weights": "w2"}, "'w3k', 'w4', 'w4k', 'w8' or 'bf16'"),
        ({"group": 16}, "32, 64 or 128"),
        ({"kv": "fp8"}, "'bf16', 'int8' or 'int4'"),
        ({"extra_bytes": -0.1}, "greater than or equal to 0"),
        ({"extra_bytes": 1.5}, "less than or equal to 1"),
        ({"extra_bytes": 0.1, "weights": "w8"}, "leave it out, or set weights to one of these"),
        ({"tokens_at_once": 0}, "greater than or equal to 1"),
        ({"threads": 2}, "Extra inputs"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        NativeDecode(calibration="none", **parameters)


def test_a_job_can_ask_for_it() -> None:
    job = {"model": "preset:gpt2", "workload": {"kind": "generate"}}
    asked = {"name": "native_decode", "weights": "w8", "group": 64, "kv": "int8"}
    spec = JobSpec.model_validate(job | {"stack": [asked]})
    assert spec.stack == (NativeDecode(weights="w8", group=64, kv="int8"),)
    with pytest.raises(SpecError, match="own key-value cache"):
        JobSpec.model_validate(job | {"stack": [asked, {"name": "static_kv_cache"}]})


@pytest.mark.parametrize(
    "kinds", [("w4", "w4", "w4"), ("w8", "w4", "w4"), ("w4", "w8", "bf16"), ("w3k", "w3k", "w4k")]
)
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
    norms = [program.final, *(norm for block in program.blocks for norm in (block.first, block.second))]
    return [norm.weight for norm in norms] + [norm.bias for norm in norms if norm.bias is not None]


@pytest.mark.slow
def test_calibration_makes_errors_up_for_each_other_on_text_that_it_has_not_seen() -> None:
    plain = load_model(parse_reference("bundled:tiny"), device="cpu", dtype="float32")
    text = sampled(plain, 2048, 4, 128, seed=7)
    without, with_ = (
        packed(load_model(parse_reference("bundled:tiny"), device="cpu", dtype="float32"), technique)[0]
        for technique in (NativeDecode(calibration="none"), NativeDecode())
    )
    assert divergence_of(with_, plain, text) < 0.6 * divergence_of(without, plain, text)


@pytest.mark.slow
@pytest.mark.parametrize("family", cases(FAMILIES))
def test_calibration_keeps_bytes_and_kinds_and_is_the_same_each_time(family: str) -> None:
    once, notes = packed(tiny_model(family), NativeDecode())
    again, _ = packed(tiny_model(family), NativeDecode())
    _, plain = packed(tiny_model(family), NativeDecode(calibration="none"))
    assert notes.facts["decode_calibration"] == "self"
    assert plain.facts["decode_calibration"] == "none"
    assert notes.facts["decode_layers"] == plain.facts["decode_layers"]
    for place in linear_places(tiny_model(family)):
        one, other = (unpack(model.get_submodule(place.path).matrix) for model in (once, again))
        assert one.equal(other)


def test_weights_of_eight_bits_are_not_calibrated() -> None:
    models = [
        packed(tiny_model("llama"), NativeDecode(weights="w8", calibration=way))[0]
        for way in ("self", "none")
    ]
    for place in linear_places(tiny_model("llama")):
        one, other = (unpack(model.get_submodule(place.path).matrix) for model in models)
        assert one.equal(other)


# ---- Weights that are kept.


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(BOUND.variable)
    return tmp_path / "optigpu" / "decode"


def never(*_: Any) -> Any:
    raise AssertionError("the weights were packed again")


@pytest.mark.parametrize(("family", "head"), spread(["gpt2", "llama", "qwen2"], ["same", "w8"], by_default=3))
def test_weights_are_packed_once_and_then_read(
    family: str, head: Any, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    technique = NativeDecode(head=head, extra_bytes=0.1)
    first, notes = packed(tiny_model(family), technique)
    assert len(list(kept.glob("*.safetensors"))) == 1
    monkeypatch.setattr("optigpu.techniques.decoding.native_decode.packing.exchange_linears", never)
    again, other_notes = packed(tiny_model(family), technique)
    assert other_notes.facts == notes.facts
    expected, found = dict(first.named_buffers()), dict(again.named_buffers())
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert weight_bytes(again) == weight_bytes(first)
    logits = []
    for model in (first, again):
        decoder = decoder_of(model)
        decoder.begin(*prompt().shape)
        logits.append(decoder.extend(prompt()))
    assert logits[0].equal(logits[1])


def test_other_weights_and_other_options_are_packed_anew(kept: Path) -> None:
    packed(tiny_model("llama"), NativeDecode(calibration="none"))
    other = tiny_model("llama")
    other.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    for model, technique in (
        (other, NativeDecode(calibration="none")),
        (tiny_model("llama"), NativeDecode()),
        (tiny_model("llama"), NativeDecode(calibration="none", head="bf16")),
    ):
        before = len(list(kept.glob("*.safetensors")))
        found, _ = packed(model, technique)
        assert len(list(kept.glob("*.safetensors"))) == before + 1
        assert attached(found).head.kind == ("bf16" if technique.head == "bf16" else "w4")


def test_what_does_not_change_the_weights_makes_no_other_file(kept: Path) -> None:
    for technique in (NativeDecode(calibration="none"), NativeDecode(calibration="none", kv="int8")):
        packed(tiny_model("llama"), technique)
    packed(tiny_model("llama"), NativeDecode(weights="w8"))  # takes no time to speak of
    assert len(list(kept.glob("*.safetensors"))) == 1


def test_a_store_that_is_off_keeps_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BOUND.variable, "0")
    packed(tiny_model("llama"))
    assert not kept.exists()
