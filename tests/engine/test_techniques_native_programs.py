"""What native_decode runs: a program for every family that it is for, sequences that join and leave, guesses."""

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2ForSequenceClassification

from optigpu.backends.torch.device import CpuClock
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.storages import storage_of, storages
from optigpu.ops.decode.cpu.packing import unpack
from optigpu.ops.decode.program import WEIGHT_KINDS, CacheKind, WeightKind
from optigpu.surgery.places import linear_places
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear
from optigpu.techniques.decoding.native_decode.loop import NativeLoop, NativeSlots
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.techniques.decoding.speculative_decoding import SpeculativeDecoding
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import OptiGPUError, ReplicateError, UnsupportedError
from tests.breadth import cases, spread
from tests.engine.decode_reference import ReferenceDecoder, untied
from tests.engine.decoder_models import DECODERS, configured, decoder_model, decoder_of, packed, twin
from tests.engine.test_techniques_speculative import no_loop
from tests.engine.tiny_models import FAMILIES, VOCABULARY, prompt, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
LENGTH = 14


KINDS: tuple[WeightKind, ...] = ("w4", "w8", "bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        case
        for place, name in enumerate(DECODERS)
        for case in cases([(name, kind) for kind in (*KINDS[place % 3 :], *KINDS[: place % 3])], 1)
    ],
)
def test_a_program_computes_what_the_model_of_the_packed_weights_computes(
    name: str, kind: WeightKind
) -> None:
    """And so does the model itself: their logits after each of 64 greedy tokens, for every family."""
    model, _ = packed(decoder_model(name), NativeDecode(calibration="none", weights=kind))
    plain, count = twin(decoder_model(name), model), attached(model).context
    reference = ReferenceDecoder(attached(model), exact=True)
    reference.begin(2, count)
    token, text, logits = prompt(2, 1), [], []
    for _ in range(count):
        text.append(token)
        logits.append(reference.extend(token))
        token = logits[-1].argmax(dim=1, keepdim=True)
    found, tokens = torch.stack(logits, dim=1), torch.cat(text, dim=1)
    expected = plain(input_ids=tokens, use_cache=False).logits
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    assert found.argmax(dim=2).equal(expected.argmax(dim=2))
    own = model(input_ids=tokens, use_cache=False).logits
    assert own.dtype == torch.float32
    assert float((own - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def tensors_of(part: object) -> Iterator[torch.Tensor]:
    """All tensors of a program or of a part of it."""
    if isinstance(part, torch.Tensor):
        yield part
    elif is_dataclass(part):
        yield from (tensor for each in fields(part) for tensor in tensors_of(getattr(part, each.name)))
    elif isinstance(part, tuple):
        yield from (tensor for each in part for tensor in tensors_of(each))


@pytest.mark.parametrize("name", ["gpt_oss", "glm4_moe", "gemma3", "olmo2"])
def test_the_memory_meter_counts_every_tensor_that_a_step_reads(name: str) -> None:
    model, _ = packed(decoder_model(name), NativeDecode(weights="w4", calibration="none"))
    counted = storages((*model.parameters(), *model.buffers()))
    assert {storage_of(tensor) for tensor in tensors_of(attached(model))} <= set(counted)


@pytest.mark.parametrize("name", DECODERS)
def test_the_operator_computes_what_the_reference_computes(name: str) -> None:
    """With bfloat16 weights: an activation that is rounded to int8 the other way would change all that follow."""
    model, _ = packed(decoder_model(name), NativeDecode(calibration="none", weights="bf16"))
    tokens, logits = untied(attached(model), "bf16", 2, LENGTH)
    operator = decoder_of(model)
    operator.begin(2, LENGTH)
    for part, expected in zip(tokens.split([LENGTH - 2, 1, 1], dim=1), logits[-3:], strict=True):
        assert float((operator.extend(part) - expected).abs().max()) <= 1e-3 * float(expected.abs().max())


def damaged(path: str) -> Any:
    model = tiny_model("gpt2")
    model.get_submodule(path).weight.data[1, 3] = torch.nan
    return model


def with_modules(family: str, technique: Technique) -> Any:
    model = tiny_model(family)
    technique.modules(model, Notes())
    return model


def classifier() -> Any:
    return GPT2ForSequenceClassification(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PARTIAL = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.5}
REFUSED: dict[str, Callable[[], Any]] = {
    "supports GPT2LMHeadModel, .*, not BloomForCausalLM": lambda: bloom(),
    "not GPT2ForSequenceClassification": classifier,
    "does not support do_layer_norm_before = False": lambda: configured("opt", do_layer_norm_before=False),
    "word_embed_proj_dim = 32, only hidden_size": lambda: configured("opt", word_embed_proj_dim=32),
    "add_cross_attention = True": lambda: configured("gpt2", add_cross_attention=True),
    "rope_parameters.rope_type = 'dynamic', only 'default' or 'linear'": lambda: configured(
        "llama", rope_parameters=DYNAMIC
    ),
    "rope_parameters.partial_rotary_factor = 0.5, only 1.0": lambda: configured(
        "llama", rope_parameters=PARTIAL
    ),
    "hidden_act = 'quick_gelu', only 'gelu_new'": lambda: configured("llama", hidden_act="quick_gelu"),
    "use_bidirectional_attention = True": lambda: configured("gemma2", use_bidirectional_attention=True),
    "clip_qkv = 8.0": lambda: configured("olmo", clip_qkv=8.0),
    "n_group = 2": lambda: configured("glm4_moe", n_group=2, topk_group=1, n_routed_experts=4),
    "intermediate_size that is a multiple of 16 .*; this model has 88": lambda: configured(
        "phi3", intermediate_size=88
    ),
    "layer_norm_elementwise_affine = False": lambda: configured("opt", layer_norm_elementwise_affine=False),
    "_remove_final_layer_norm = True": lambda: configured("opt", _remove_final_layer_norm=True),
    "head size that is a multiple of 4 .*; this model has 3": lambda: configured(
        "gpt2", n_embd=96, n_head=32
    ),
    "hidden size that is a multiple of 16; this model has 72": lambda: configured(
        "gpt2", n_embd=72, n_head=9
    ),
    "at most 512; this model has 544": lambda: configured("llama", head_dim=544),
    "inputs are a multiple of 32; .*down_proj has 40": lambda: configured("llama", intermediate_size=40),
    "c_fc.weight has some that are NaN or infinite": lambda: damaged("transformer.h.1.mlp.c_fc"),
    "wpe.weight has some that are NaN or infinite": lambda: damaged("transformer.wpe"),
    "quantized already .Int8Linear": lambda: with_modules("gpt2", Int8WeightOnly()),
    "quantized already .DecodeLinear": lambda: packed(tiny_model("llama"))[0],
    "needs the blocks of transformers' LlamaForCausalLM, and .* differs": lambda: with_modules(
        "llama", FusedQkv()
    ),
}
"""Models, by the words with which they are refused."""


def bloom() -> Any:
    return BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=96))


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_run_is_refused_and_left_as_it_was(words: str) -> None:
    model = REFUSED[words]()
    before = [(type(module), id(module)) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=rf"^native_decode.*{words}.*[^.]\.$"):
        NativeDecode(weights="w4", calibration="none").modules(model, Notes())
    assert [(type(module), id(module)) for module in model.modules()] == before


# ---- Under load and with guesses.


NEW_TOKENS = 20
SERVED = (*FAMILIES, "gemma3", "gpt_oss", "glm4_moe", "gpt_neox")


def serving_loop(family: str, **options: Any) -> tuple[Any, Notes]:
    technique = NativeDecode(**{"weights": "w4", "calibration": "none"} | options)
    model, notes = packed(decoder_model(family), technique)
    return technique.loop(no_loop, model, notes), notes


def alone(loop: Any, ids: list[int], new_tokens: int) -> list[int]:
    """What the loop decodes for one sequence."""
    tokens: list[int] = loop(torch.tensor([ids]), new_tokens, CpuClock())[0][0].tolist()
    return tokens


# ---- Sequences that join and leave.
@pytest.mark.parametrize(
    ("family", "weights", "kv"),
    spread(SERVED, WEIGHT_KINDS, ["bf16", "int8", "int4"], by_default=len(SERVED)),
)
def test_a_sequence_is_what_it_is_alone(family: str, weights: WeightKind, kv: CacheKind) -> None:
    source = random.Random(family)
    serving, notes = serving_loop(family, weights=weights, kv=kv)
    single, _ = serving_loop(family, weights=weights, kv=kv)
    slots: NativeSlots = serving.slots(4, 32, 16)
    assert (slots.count, slots.length, slots.block_tokens) == (4, 32, 16)
    assert notes.facts["kv_cache"] == "native, paged"
    running: dict[int, tuple[list[int], list[int]]] = {}  # what it should become, and what it is so far
    for _ in range(60):
        for slot in range(4):
            if slot not in running and source.random() < 0.5:
                ids = [source.randrange(VOCABULARY) for _ in range(source.randint(1, 20))]
                expected = alone(single, ids, source.randint(1, 32 - len(ids)))
                running[slot] = expected, [slots.join(slot, ids)]
        asked_for = [slot for slot, (expected, found) in running.items() if len(found) < len(expected)]
        source.shuffle(asked_for)
        if asked_for:
            for slot, token in zip(asked_for, slots.step(asked_for), strict=True):
                running[slot][1].append(token)
        for slot, (expected, found) in list(running.items()):
            assert found == expected[: len(found)]
            if len(found) == len(expected):
                slots.leave(slot)
                del running[slot]
    slots.close()


def test_a_place_that_is_taken_or_not_there_is_refused() -> None:
    slots = serving_loop("gpt2")[0].slots(2, 32, 16)
    slots.join(0, [1, 2])
    for slot in (0, 2, -1):
        with pytest.raises(OptiGPUError, match=f"Place {slot} is not a free one of 2"):
            slots.join(slot, [1])
    with pytest.raises(ReplicateError, match="Position 32 is out of range: the cache has room for 32 tokens"):
        slots.join(1, [1] * 33)
    slots.leave(0)
    slots.join(0, [1, 2])


# ---- Guesses.
def with_guesses(family: str, guesses: SpeculativeDecoding, **options: Any) -> Any:
    return runtime_of(
        f"path:{family}", NativeDecode(**{"weights": "w4", "calibration": "none"} | options), guesses
    )


@pytest.mark.parametrize(("family", "draft"), spread(FAMILIES, [None, "itself", "another"], by_default=4))
def test_guesses_change_no_token(family: str, draft: str | None) -> None:
    other = "path:llama" if family == "gpt2" else "path:gpt2"
    reference = {None: None, "itself": f"path:{family}", "another": other}[draft]
    runtime = with_guesses(family, SpeculativeDecoding(draft=reference))
    expected = runtime_of(f"path:{family}", NativeDecode(weights="w4", calibration="none"))
    for length in (8, 3):
        tokens = runtime.generate(prompt(1, length), NEW_TOKENS).tokens
        assert tokens.equal(expected.generate(prompt(1, length), NEW_TOKENS).tokens)
    assert runtime.notes.facts["speculation_agreement"] == 1.0
    assert runtime.notes.facts["tokens_per_pass"] >= 1
    assert runtime.notes.facts["decode_loop"] == "native operator"


@pytest.mark.parametrize("prefill", [0, 5])
def test_quality_is_that_of_the_passes_that_verify(prefill: int) -> None:
    runtime = with_guesses("llama", SpeculativeDecoding(lookahead=3))
    plain = runtime_of("path:llama", NativeDecode(weights="w4", calibration="none"))
    found, expected = (list(each.score(prompt(2, 19), prefill)) for each in (runtime, plain))
    assert len(found) == 19 - prefill
    assert all(ours.equal(its) for ours, its in zip(found, expected, strict=True))


def test_the_draft_is_packed_as_the_model_is_and_counted() -> None:
    technique = NativeDecode(calibration="none", weights="w8")
    alone_, drafted = (
        runtime_of("path:llama", technique, *more) for more in ((), (SpeculativeDecoding(draft="path:gpt2"),))
    )
    draft, expected = drafted.model.speculative_draft, packed(tiny_model("gpt2"), technique)[0]
    assert weight_bytes(drafted.model) == weight_bytes(alone_.model) + weight_bytes(expected)
    assert linear_places(draft) == []
    for path, layer in expected.named_modules():
        if isinstance(layer, DecodeLinear):
            assert unpack(draft.get_submodule(path).matrix).equal(unpack(layer.matrix))


def test_tokens_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the operator that verifies were at fault."""
    runtime = with_guesses("gpt2", SpeculativeDecoding())
    tokens = (
        runtime_of("path:gpt2", NativeDecode(weights="w4", calibration="none")).generate(prompt(1), 6).tokens
    )
    monkeypatch.setattr(NativeLoop, "__call__", lambda *_: (tokens + (tokens == tokens[0, 3]), []))
    with pytest.raises(ReplicateError, match="chose another token than without at"):
        runtime.generate(prompt(1), 6)
