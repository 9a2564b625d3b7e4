"""Sequences that join and leave a transformers model: their tokens are those that each has alone."""

from typing import Any

import numpy as np
import pytest

from optigpu.backends.serving import ServingRuntime
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.backends.torch.slots import BlockTable, TorchSlots
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.serve import Serve
from tests.engine.tiny_models import FAMILIES, VOCABULARY, asked, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir")
SERVE = Serve.model_validate(
    {"scenario": "closed", "clients": 3, "queries": 6, "prompt_tokens": 3, "prompt_tokens_most": 20}
    | {"new_tokens": 4, "new_tokens_most": 12, "slots": 3, "block_tokens": 4}
)


def prompts(*lengths: int) -> list[list[int]]:
    source = np.random.default_rng(5)
    return [source.integers(VOCABULARY, size=length).tolist() for length in lengths]


def alone(runtime: TorchDecodingRuntime, prompt: list[int], tokens: int) -> list[int]:
    found: list[int] = runtime.generate(np.array([prompt]), tokens).tokens[0].tolist()
    return found


def interleaved(runtime: ServingRuntime, block_tokens: int) -> None:
    """Three join at different moments, one leaves early, and a fourth takes its place."""
    long, short, late, last = given = prompts(17, 3, 9, 5)
    slots = runtime.slots(3, 48, block_tokens)
    found = {0: [slots.join(0, long)], 1: [slots.join(1, short)]}
    for _ in range(3):
        _step(slots, found, [0, 1])
    found[2] = [slots.join(2, late)]
    for _ in range(4):
        _step(slots, found, [2, 0, 1])
    slots.leave(1)
    found[3] = [slots.join(1, last)]
    for _ in range(6):
        for place, token in zip((1, 0), slots.step([1, 0]), strict=True):
            found[3 if place == 1 else 0].append(token)
    _step(slots, found, [2])
    slots.close()
    for number, tokens in found.items():
        expected = alone(runtime, given[number], len(tokens))  # type: ignore[arg-type]
        assert tokens == expected, number


def _step(slots: Any, found: dict[int, list[int]], places: list[int]) -> None:
    for place, token in zip(places, slots.step(places), strict=True):
        found[place].append(token)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_has_the_tokens_that_it_has_alone(family: str) -> None:
    interleaved(asked(runtime_of(f"path:{family}")), 4)


@pytest.mark.parametrize("block_tokens", [1, 7, 64])
def test_so_it_is_with_blocks_of_any_size(block_tokens: int) -> None:
    interleaved(asked(runtime_of("path:llama")), block_tokens)


@pytest.mark.parametrize(
    "technique", [EagerAttention(), InferenceMode(), Int8WeightOnly()], ids=lambda t: t.name
)
def test_so_it_is_with_a_stack_that_keeps_the_step(technique: Any) -> None:
    interleaved(asked(runtime_of("path:llama", technique)), 4)


def blocks_in_use(table: BlockTable) -> int:
    """Of all places together."""
    return sum(map(len, table._blocks))


def test_blocks_are_taken_as_a_sequence_grows_and_given_back() -> None:
    import torch

    table = BlockTable(2, 10, 4, torch.device("cpu"))
    assert table.pool_tokens == 24
    table.place(0, 5)
    assert blocks_in_use(table) == 2
    for _ in range(5):
        table.place_all([0])
    assert (table.lengths[0], blocks_in_use(table)) == (10, 3)
    table.place(1, 9)
    assert len(set(table.written.tolist())) == 9
    assert blocks_in_use(table) == 6
    table.give_back(0)
    assert blocks_in_use(table) == 3
    mask = table.place_all([1])
    assert mask.sum().item() == 10


def test_runs_have_the_same_memory_and_no_sequence_of_the_last() -> None:
    runtime = asked(runtime_of("path:llama"))
    (prompt,) = prompts(6)
    first = runtime.slots(2, 16, 4)
    token = first.join(0, prompt)
    first.step([0])
    again = runtime.slots(2, 16, 4)
    assert again is first
    assert again.join(0, prompt) == token
    assert [token, *again.step([0])] == alone(runtime, prompt, 2)
    assert runtime.slots(3, 16, 4) is not first
    other = runtime.slots(2, 16, 4)
    other.close()
    assert runtime.slots(2, 16, 4) is not other


def test_the_check_of_a_load_finds_tokens_that_others_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = asked(runtime_of("path:llama"))
    request = SERVE.prepare(runtime)
    assert request.check().problem is None
    assert (request.facts().block_tokens, request.facts().runs) == (4, 0)
    request.run()
    assert (request.facts().runs, request.facts().saturated_runs) == (1, None)
    own = TorchSlots._mask
    monkeypatch.setattr(TorchSlots, "_mask", lambda self, attended: own(self, attended | True))
    assert "not what the engine predicts" in (SERVE.prepare(runtime).check().problem or "")


def test_tokens_under_load_are_compared_with_those_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = asked(runtime_of("path:llama"))
    found = SERVE.prepare(runtime).alone_agreement(512)
    assert (found.share, found.requests, found.same_requests, found.most_at_once) == (1.0, 6, 6, 3)
    few = SERVE.prepare(runtime).alone_agreement(20)
    assert few.requests < 6
    assert few.share == 1.0
    own = TorchSlots._mask
    monkeypatch.setattr(TorchSlots, "_mask", lambda self, attended: own(self, attended | True))
    assert SERVE.prepare(runtime).alone_agreement(512).share < 0.9


def test_the_cache_is_noted_in_blocks() -> None:
    runtime = asked(runtime_of("path:gpt2"))
    SERVE.prepare(runtime)
    assert runtime.notes.facts["kv_cache"] == "paged"
    assert runtime.notes.facts["kv_cache_block_tokens"] == 4
    assert runtime.notes.facts["decode_loop"] == "continuous batching"


def test_a_loop_of_whole_batches_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    model = runtime_of("path:llama")
    monkeypatch.setattr(model, "_replacing", ["own_loop"])
    with pytest.raises(UnsupportedError, match="own_loop replaces the decode loop by one of whole batches"):
        asked(model).slots(1, 8, 4)


def test_an_engine_without_places_says_so() -> None:
    class Whole:
        """A DecodingRuntime, as far as the workload looks at one."""

        seed = 0

    with pytest.raises(UnsupportedError, match="lets no sequence join or leave"):
        SERVE.prepare(Whole())  # type: ignore[arg-type]


def test_layers_with_a_window_are_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mistral", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, sliding_window=8, max_position_embeddings=64,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match="attend to the whole sequence"):
        TorchSlots(model, _no_mode, 1, 8, 4)


def _no_mode() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_a_model_is_a_serving_runtime() -> None:
    assert isinstance(asked(runtime_of("path:gpt2")), ServingRuntime)
