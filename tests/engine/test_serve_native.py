"""serve by native_decode, whose sequences are decoded together in one pass of its operator."""

from typing import Any

import pytest

from optigpu.child.messages import Metered, Ready, Round, RunMeter, RunRound
from optigpu.techniques.decoding.native_decode.loop import NativeSlots
from tests.engine.in_process import in_process
from tests.engine.test_replicate import answer, ask, assignment

SHAPES = {"kind": "serve", "queries": 6, "prompt_tokens": 4, "prompt_tokens_most": 12, "new_tokens": 8}
SERVER = {"rates": [20_000]}
NATIVE = {"name": "native_decode", "calibration": "none"}
CLIENTS = {"scenario": "closed", "clients": 3, "slots": 3}


def told(workload: dict[str, Any]) -> tuple[Ready, Round, Metered]:
    with in_process() as child:
        child.tell(assignment(SHAPES | workload, "bundled:tiny", NATIVE))
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
