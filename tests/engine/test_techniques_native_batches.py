"""native_decode under load and with guesses: the tokens of plain native decoding."""

import random
from typing import Any

import pytest

from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.decode.cpu.packing import unpack
from optigpu.ops.decode.program import CacheKind, WeightKind
from optigpu.surgery.places import linear_places
from optigpu.techniques.base import Notes
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear
from optigpu.techniques.decoding.native_decode.slots import NativeSlots
from optigpu.techniques.decoding.speculative_decoding import SpeculativeDecoding
from optigpu.vocabulary import OptiGPUError, ReplicateError, UnsupportedError
from optigpu.workloads.generate import Generate
from tests.breadth import spread
from tests.engine.decoder_models import packed
from tests.engine.tiny_models import FAMILIES, VOCABULARY, asked, prompt, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
NEW_TOKENS = 20


def no_loop(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
    raise AssertionError("nothing was to be decoded")


def serving_loop(family: str, **options: Any) -> tuple[Any, Notes]:
    technique = NativeDecode(calibration="none", **options)
    model, notes = packed(tiny_model(family), technique)
    return technique.loop(no_loop, model, notes), notes


def alone(loop: Any, ids: list[int], new_tokens: int) -> list[int]:
    """What the loop decodes for one sequence."""
    import torch

    from optigpu.backends.torch.clock import CpuClock

    tokens: list[int] = loop(torch.tensor([ids]), new_tokens, CpuClock())[0][0].tolist()
    return tokens


# ---- Sequences that join and leave.


@pytest.mark.parametrize(
    ("family", "weights", "kv"),
    spread(FAMILIES, ["w3k", "w4", "w4k", "w8", "bf16"], ["bf16", "int8", "int4"], by_default=5),
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


def test_pages_that_are_no_multiple_of_the_operator_s_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="ask for pages of 32 tokens"):
        serving_loop("gpt2")[0].slots(2, 32, 20)


# ---- Guesses.


def with_guesses(family: str, guesses: SpeculativeDecoding, **options: Any) -> Any:
    return runtime_of(f"path:{family}", NativeDecode(calibration="none", **options), guesses)


@pytest.mark.parametrize(("family", "draft"), spread(FAMILIES, [None, "itself", "another"], by_default=4))
def test_guesses_change_no_token(family: str, draft: str | None) -> None:
    other = "path:llama" if family == "gpt2" else "path:gpt2"
    reference = {None: None, "itself": f"path:{family}", "another": other}[draft]
    runtime = with_guesses(family, SpeculativeDecoding(draft=reference))
    expected = runtime_of(f"path:{family}", NativeDecode(calibration="none"))
    for length in (8, 3):
        tokens = runtime.generate(prompt(1, length), NEW_TOKENS).tokens
        assert tokens.equal(expected.generate(prompt(1, length), NEW_TOKENS).tokens)
    assert runtime.notes.facts["speculation_agreement"] == 1.0
    assert runtime.notes.facts["tokens_per_pass"] >= 1
    assert runtime.notes.facts["decode_loop"] == "native operator"


def test_tokens_of_one_pass_share_a_mark_and_have_no_times_of_their_own() -> None:
    runtime = with_guesses("gpt2", SpeculativeDecoding(), tokens_at_once=5)
    request = Generate(prompt_tokens=8, new_tokens=16).prepare(asked(runtime))
    request.run()
    assert set(request.described()) == {"pass_s"}
    assert 1 <= len(request.described()["pass_s"]) <= 3
    assert request.check().problem is None


@pytest.mark.parametrize("prefill", [0, 5])
def test_quality_is_that_of_the_passes_that_verify(prefill: int) -> None:
    runtime = with_guesses("llama", SpeculativeDecoding(lookahead=3))
    plain = runtime_of("path:llama", NativeDecode(calibration="none"))
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


def test_a_batch_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="needs a batch size of 1, not 2"):
        with_guesses("gpt2", SpeculativeDecoding()).generate(prompt(2), 4)


def test_tokens_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the operator that verifies were at fault."""
    runtime = with_guesses("gpt2", SpeculativeDecoding())
    tokens = runtime_of("path:gpt2", NativeDecode(calibration="none")).generate(prompt(1), 6).tokens
    monkeypatch.setattr(runtime._decode, "_plain", lambda *_: (tokens + (tokens == tokens[0, 3]), []))
    with pytest.raises(ReplicateError, match="chose another token than without at"):
        runtime.generate(prompt(1), 6)
