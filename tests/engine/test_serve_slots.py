"""serve by transformers and by native_decode: sequences that join and leave have the tokens that each has alone."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.backends.serving import ServingRuntime
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.backends.torch.slots import TorchSlots
from optigpu.child.messages import Metered, Ready, Round, RunMeter, RunRound
from optigpu.techniques.decoding.native_decode.loop import NativeSlots
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.serve import Serve
from tests.engine.measuring import in_process
from tests.engine.test_replicate import answer, ask, assignment
from tests.engine.tiny_models import FAMILIES, VOCABULARY, asked, runtime_of

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


@pytest.mark.usefixtures("models_dir")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_has_the_tokens_that_it_has_alone(family: str) -> None:
    interleaved(asked(runtime_of(f"path:{family}")), 4)


@pytest.mark.usefixtures("models_dir")
@pytest.mark.parametrize(
    "technique", [EagerAttention(), InferenceMode(), Int8WeightOnly()], ids=lambda t: t.name
)
def test_so_it_is_with_a_stack_that_keeps_the_step(technique: Any) -> None:
    interleaved(asked(runtime_of("path:llama", technique)), 4)


@pytest.mark.usefixtures("models_dir")
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


@pytest.mark.usefixtures("models_dir")
def test_layers_with_a_window_are_refused() -> None:
    config = AutoConfig.for_model(
        "mistral", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, sliding_window=8, max_position_embeddings=64,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match="attend to the whole sequence"):
        TorchSlots(model, _no_mode, 1, 8, 4)


def _no_mode() -> Any:
    return nullcontext()


NATIVE_SHAPES = {"kind": "serve", "queries": 6, "prompt_tokens": 4, "prompt_tokens_most": 12, "new_tokens": 8}
SERVER = {"rates": [20_000]}
NATIVE = {"name": "native_decode", "weights": "w4", "calibration": "none"}
CLIENTS = {"scenario": "closed", "clients": 3, "slots": 3}


def told(workload: dict[str, Any]) -> tuple[Ready, Round, Metered]:
    with in_process() as child:
        child.tell(assignment(NATIVE_SHAPES | workload, "bundled:tiny", NATIVE))
        ready = answer(child)
        assert isinstance(ready, Ready), ready
        heard = ask(child, RunRound(seconds=0, min_requests=2))
        assert isinstance(heard, Round)
        metered = ask(child, RunMeter(meter="quality"))
        assert isinstance(metered, Metered)
        return ready, heard, metered


@pytest.mark.slow
@pytest.mark.parametrize("workload", [SERVER, CLIENTS], ids=["Server", "closed"])
def test_its_batches_have_the_tokens_of_each_request_alone(workload: dict[str, Any]) -> None:
    ready, heard, metered = told(workload)
    assert ready.problem is None
    assert ready.facts.kv_cache == "native, paged"
    assert ready.facts.decode_loop == "native operator, continuous batching"
    for load in heard.loads:
        assert (load.failed, load.law.holds, len(load.ttft_s)) == (0, True, 6)
        assert set(load.output_tokens) == {8}
    assert metered.values["alone_agreement"] == 1.0
    noted: Any = metered.facts.recorded["alone_agreement"]
    assert (noted["same_requests"], noted["same_tokens"]) == (6, 48)
    assert noted["most_at_once"] > 1


@pytest.mark.slow
def test_tokens_of_another_sequence_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = NativeSlots.step

    def exchanged(slots: NativeSlots, places: Any) -> Any:
        return list(reversed(own(slots, places)))

    monkeypatch.setattr(NativeSlots, "step", exchanged)
    ready, _, metered = told(CLIENTS)
    assert "not what the engine predicts" in str(ready.problem)
    assert metered.values["alone_agreement"] < 0.9
