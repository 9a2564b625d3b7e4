"""The torch backend: which loop decodes, what is recorded, how it warms up, and the boundary to numpy."""

import gc
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
import transformers

from optigpu.backends.torch.applied import DecodingModel, computed_there
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.meters.latency import run_round, warm_up
from optigpu.techniques.base import Loop, Notes, Phase, Technique
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.vocabulary import Layer
from optigpu.workloads.base import Check, Request
from tests.engine.meter_contexts import Spy
from tests.engine.tiny_models import FAMILIES, VOCABULARY, asked, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir")


class LoopSpy(Technique):
    """Overrides `loop` without changing it."""

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    name: Literal["loop_spy"] = "loop_spy"

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        def counted(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
            notes.record(loops=notes.facts.get("loops", 0) + 1)
            return loop(prompt, new_tokens, clock)

        return counted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stack", [(), (StaticKvCache(),), (NoKvCache(),)], ids=["dynamic", "static", "none"])
def test_the_library_decodes_as_long_as_nobody_wants_the_step(
    family: str, stack: tuple[Technique, ...]
) -> None:
    runtime = runtime_of(f"path:{family}", *stack)
    library: Any = runtime.model.generate
    expected = library(prompt(), max_new_tokens=6, do_sample=False)[:, 8:]
    generation = runtime.generate(prompt(), 6)
    assert generation.tokens.equal(expected)
    assert len(generation.gaps_s) == 6
    assert runtime.notes.facts["decode_loop"] == "transformers generate"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "stack", [(Spy(),), (Spy(), StaticKvCache()), (LoopSpy(),)], ids=["step", "static", "loop"]
)
def test_the_lean_loop_decodes_the_same_tokens(family: str, stack: tuple[Technique, ...]) -> None:
    runtime = runtime_of(f"path:{family}", *stack)
    expected = runtime_of(f"path:{family}").generate(prompt(), 6).tokens
    generations = [runtime.generate(prompt(), 6) for _ in range(2)]
    assert all(generation.tokens.equal(expected) for generation in generations)
    assert [len(generation.gaps_s) for generation in generations] == [6, 6]
    facts = runtime.notes.facts
    assert facts["decode_loop"] == "lean loop"
    assert (
        (len(facts["seen"]), facts["seen"][-1][1]) == (10, 12)
        if isinstance(stack[0], Spy)
        else facts["loops"] == 2
    )


def test_a_static_cache_is_kept_between_requests_and_a_dynamic_one_is_not() -> None:
    static, dynamic = runtime_of("path:gpt2", Spy(), StaticKvCache()), runtime_of("path:gpt2", Spy())
    kept = {use_and_identify(static) for _ in range(3)}
    assert len(kept) == 1
    dynamic.generate(prompt(), 3)
    assert dynamic.notes.facts["kv_cache"] == "dynamic"


def test_logits_come_from_the_step_that_is_timed() -> None:
    runtime = runtime_of("path:gpt2", Spy(), StaticKvCache())
    runtime.logits(prompt())
    ((_, position, _),) = runtime.notes.facts["seen"]
    assert position == 7


def test_what_the_baseline_really_used_is_recorded() -> None:
    runtime = runtime_of("path:gpt2")
    runtime.observe(prompt())
    assert runtime.notes.facts == {
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "kv_cache": "dynamic",
        "autograd": "no_grad",
        "decode_loop": "transformers generate",
        "versions": {"transformers": transformers.__version__},
        "attention_kernels": ["aten::_scaled_dot_product_flash_attention_for_cpu"],
        "product_dtypes": ["float32"],
        "device_kernels": None,
    }


@pytest.mark.parametrize(
    ("ran_kernels", "products", "there"),
    [
        (False, [], False),
        (True, [], True),
        (True, [True, True, False], True),
        (True, [True, False], True),
        (True, [True, False, False], False),
        (True, [False], False),
    ],
)
def test_a_device_that_copies_and_chooses_but_does_not_multiply_did_not_compute(
    ran_kernels: bool, products: list[bool], there: bool
) -> None:
    assert computed_there(ran_kernels, products) == there


class Fixed(Request):
    """A request that counts how often it is run."""

    def __init__(self, durations: list[float]) -> None:
        self.runs = 0

    def run(self) -> dict[str, float]:
        self.runs += 1
        return {"latency_s": float(self.runs)}

    def check(self) -> Check:
        return Check(0.0)

    def observe(self) -> None:
        """Nothing."""

    def fresh(self, seed: int) -> "Fixed":
        return self


@pytest.mark.slow
def test_the_garbage_collector_rests_within_a_round_and_works_after_it() -> None:
    class Watching(Fixed):
        def run(self) -> dict[str, float]:
            return {"latency_s": float(gc.isenabled())}

    assert run_round(Watching([]), seconds=0).samples == {"latency_s": (0.0,)}
    assert gc.isenabled()


class Scripted(Fixed):
    """A request with scripted durations, on a clock that does not move in between."""

    def __init__(self, durations: list[float]) -> None:
        super().__init__(durations)
        self.now = 0.0
        self.left = list(durations)

    def run(self) -> dict[str, float]:
        self.now += self.left.pop(0)
        return {}


@pytest.mark.parametrize(
    ("durations", "used", "steady", "request_s", "beyond_s"),
    [
        ([9.0, 1.0, 1.0, 1.0, 7.0], 4, True, 1.0, 8.0),
        ([1.0, 1.0, 1.0, 7.0], 3, True, 1.0, 0.0),
        ([30.0, 2.0, 1.0, 1.02, 1.0, 7.0], 5, True, 1.0, 30.0),
        ([16.0, 16.2, 7.0], 2, True, 16.2, 0.0),
        ([60.0, 16.0, 7.0], 2, False, 16.0, 44.0),
        ([1.0, 2.0] * 8, 5, False, 1.0, None),
    ],
)
def test_warm_up_ends_when_requests_agree_or_at_the_cap(
    durations: list[float],
    used: int,
    steady: bool,
    request_s: float,
    beyond_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Scripted(durations[1:])
    monkeypatch.setattr("time.perf_counter", lambda: request.now)
    warm = warm_up(request, durations[:1])
    assert (len(warm.durations_s), warm.steady, warm.request_s) == (used, steady, request_s)
    if beyond_s is not None:
        assert warm.beyond_steady_s == pytest.approx(beyond_s, abs=0.1)


@pytest.mark.parametrize(
    ("first_s", "steps_s", "used"),
    [
        (5.0, [0.2] * 4 + [0.04] * 12, 1),
        (6.0, [0.2] * 8 + [0.04] * 8, 2),
        (6.0, [0.5] * 8, 2),
        (1.0, [0.04] * 16, 3),
    ],
    ids=["steady after its first quarter", "slow in half of it", "few steps", "short"],
)
def test_a_long_request_is_judged_by_its_own_steps(
    first_s: float, steps_s: list[float], used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stepping(Scripted):
        def described(self) -> dict[str, list[float]]:
            return {"token_s": steps_s}

    request = Stepping([first_s] * 5)
    monkeypatch.setattr("time.perf_counter", lambda: request.now)
    warm = warm_up(request, [first_s])
    assert (len(warm.durations_s), warm.steady) == (used, True)


def use_and_identify(runtime: DecodingModel) -> int:
    runtime.generate(prompt(), 3)
    return int(runtime.notes.facts["seen"][-1][2])


IDS = prompt().numpy()


@pytest.fixture(scope="module")
def runtime(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchDecodingRuntime:
    return asked(runtime_of("path:llama", Bf16()), tmp_path_factory.mktemp("job"))


def test_tokens_and_logits_are_those_of_the_model_in_numpy(runtime: TorchDecodingRuntime) -> None:
    made = runtime.generate(IDS, 4)
    assert (made.tokens.dtype.name, made.tokens.shape, len(made.gaps_s)) == ("int64", (2, 4), 4)
    assert np.array_equal(made.tokens, runtime.decoding.generate(prompt(), 4).tokens.numpy())
    logits = runtime.logits(IDS)
    assert (logits.dtype.name, logits.shape) == ("float32", (2, VOCABULARY))
    assert np.array_equal(logits.argmax(axis=-1), made.tokens[:, 0])
    scored = list(runtime.score(IDS, 5))
    assert len(scored) == 3
    assert np.array_equal(scored[-1], logits)
    assert [each.shape for each in runtime.whole(IDS, 5)] == [(2, VOCABULARY)] * 3
    sampled = runtime.sample(3, 6)
    assert (sampled.dtype.name, sampled.shape) == ("int64", (3, 6))
    assert runtime.scoring_s(IDS, 5) > 0


def test_a_generation_keeps_its_tokens_whatever_the_next_one_gives(runtime: TorchDecodingRuntime) -> None:
    first = runtime.generate(IDS, 4).tokens
    kept = first.copy()
    runtime.generate((IDS + 1) % VOCABULARY, 4)
    assert np.array_equal(first, kept)
