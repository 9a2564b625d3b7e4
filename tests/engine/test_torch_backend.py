"""The torch backend: which loop decodes, what is recorded, its clock, and the meters around it."""

import gc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.torch.applied import DecodingModel, computed_there
from optigpu.backends.torch.clock import CpuClock
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.meters import METERS
from optigpu.meters.latency import run_round, warm_up
from optigpu.models.loading.footprint import weight_bytes
from optigpu.techniques.base import Loop, Notes, Phase, Step, Technique
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import DeviceKind, Layer, UnsupportedError
from optigpu.workloads.base import Check
from tests.engine.meter_contexts import doing, generating, multiplying
from tests.engine.tiny_models import FAMILIES, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir")


class Spy(Technique):
    """Overrides `step` without changing it."""

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    name: Literal["spy"] = "spy"

    def step(self, step: Step, notes: Notes) -> Step:
        def counted(tokens: Any, position: Any, cache: Any) -> tuple[Any, Any]:
            notes.record(steps=notes.facts.get("steps", 0) + 1, position=int(position), cache=id(cache))
            return step(tokens, position, cache)

        return counted


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
        (facts.get("steps"), facts.get("position")) == (10, 12)
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
    assert (runtime.notes.facts["steps"], runtime.notes.facts["position"]) == (1, 7)


def test_a_step_of_its_own_needs_a_cache() -> None:
    with pytest.raises(UnsupportedError, match="no_kv_cache"):
        runtime_of("path:gpt2", Spy(), NoKvCache())


def test_what_the_baseline_really_used_is_recorded() -> None:
    import torch
    import transformers

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


def test_a_machine_without_cuda_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="finds no CUDA device; install"):
        TorchOperatorRuntime(DeviceKind.CUDA, 0)


def test_a_clock_gives_the_seconds_between_its_marks() -> None:
    assert CpuClock().seconds([0, 500_000_000, 600_000_000]) == [0.5, 0.1]


def test_weights_are_counted_by_storage_and_what_is_tied_counts_once() -> None:
    model = runtime_of("path:gpt2").model
    assert weight_bytes(model) == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_memory_meter_reads_a_model(tmp_path: Path) -> None:
    context = generating(tmp_path)
    runtime: Any = context.runtime
    reading = METERS["memory"].read(context)
    count = sum(parameter.numel() for parameter in runtime.decoding.model.parameters())
    assert reading.values["params_total"] == count
    assert reading.values["bytes_per_param"] == pytest.approx(4, rel=0.001), (
        "rotary frequencies are no weights"
    )
    assert reading.values["host_peak_bytes"] > reading.values["weight_bytes"]
    assert set(reading.reasons) == {
        "peak_bytes",
        "peak_reserved_bytes",
        "params_trainable",
        "quantized_share",
    }


def test_the_memory_meter_has_reasons_where_there_is_no_model(tmp_path: Path) -> None:
    reading = METERS["memory"].read(multiplying(tmp_path))
    assert set(reading.values) == {"host_peak_bytes", "peak_bytes"}
    assert reading.reasons["weight_bytes"] == "this workload runs no model"


def test_the_hosts_peak_is_that_of_the_request(tmp_path: Path) -> None:
    import torch

    small, large = (doing(tmp_path, partial(torch.ones, size))[0] for size in (1, 50_000_000))
    peaks = [METERS["memory"].read(context).values["host_peak_bytes"] for context in (small, large)]
    assert peaks[1] - peaks[0] > 150_000_000


class Fixed:
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

    def described(self) -> dict[str, list[float]]:
        return {}

    def fresh(self, seed: int) -> "Fixed":
        return self


@pytest.mark.slow
def test_a_round_takes_at_least_and_at_most_what_it_is_told() -> None:
    least = run_round(Fixed([]), seconds=0, min_requests=3)
    assert least.samples == {"latency_s": (1.0, 2.0, 3.0)}
    assert len(least.request_s) == 3
    assert len(run_round(Fixed([]), seconds=60, min_requests=1, max_requests=5).request_s) == 5


@pytest.mark.slow
def test_the_garbage_collector_rests_within_a_round_and_works_after_it() -> None:
    import gc

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
    warm = warm_up(request, durations[0])
    assert (len(warm.durations_s), warm.steady, warm.request_s) == (used, steady, request_s)
    if beyond_s is not None:
        assert warm.beyond_steady_s == pytest.approx(beyond_s, abs=0.1)


def use_and_identify(runtime: DecodingModel) -> int:
    runtime.generate(prompt(), 3)
    return int(runtime.notes.facts["cache"])


@pytest.mark.parametrize("error", [None, ImportError("there is none")])
def test_nothing_is_collected_while_libraries_are_imported(
    monkeypatch: pytest.MonkeyPatch, error: ImportError | None
) -> None:
    seen: list[bool] = []

    def imported(name: str) -> None:
        seen.append(gc.isenabled())
        if error:
            raise error

    monkeypatch.setattr("optigpu.backends.torch.import_module", imported)
    with pytest.raises(ImportError) if error else nullcontext():
        BACKENDS["torch"].start(model=True)
    assert (seen, gc.isenabled()) == ([False], True)
