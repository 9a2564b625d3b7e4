"""kv_cache, batch_sweep, quality and generate's scenarios: what their requests are, and what their checks find."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from optigpu.backends.runtime import Generation
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.meters.base import MeterContext, QualityOptions, Reading
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes, Phase, Step, Technique
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import Layer, UnsupportedError
from optigpu.workloads.base import Workload
from optigpu.workloads.batch_sweep import BatchSweep
from optigpu.workloads.generate import Generate
from optigpu.workloads.kv_cache import KvCachePositions
from optigpu.workloads.quality import PREFILL_TOKENS, Quality
from tests.engine.quality_contexts import OwnLoop, Spoiled
from tests.engine.tiny_models import asked, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir")
QUALITY = Quality(window=16, batch_size=2)


class Positions(Technique):
    """Notes the position of each decode step."""

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    name: Literal["positions"] = "positions"

    def step(self, step: Step, notes: Notes) -> Step:
        def seen(tokens: Any, position: Any, cache: Any) -> tuple[Any, Any]:
            notes.record(positions=[*notes.facts.get("positions", []), int(position)])
            return step(tokens, position, cache)

        return seen


@pytest.fixture(scope="module")
def runtime(models_dir: Path) -> TorchDecodingRuntime:
    return asked(runtime_of("path:gpt2"))


@pytest.mark.parametrize(
    ("workload", "labels"),
    [
        (KvCachePositions(positions=(8, 32)), ["position 8", "position 32"]),
        (BatchSweep(batch_sizes=(1, 4)), ["batch 1", "batch 4"]),
    ],
    ids=["kv_cache", "batch_sweep"],
)
def test_a_list_stands_for_one_workload_each(workload: Workload, labels: list[str]) -> None:
    expanded = workload.expand()
    assert [each.label for each in expanded] == labels
    assert [each.expand() for each in expanded] == [(each,) for each in expanded]


@pytest.mark.parametrize(
    "workload",
    [
        KvCachePositions(positions=(8,), new_tokens=4),
        BatchSweep(batch_sizes=(2,), prompt_tokens=8, new_tokens=4),
        QUALITY,
    ],
    ids=lambda workload: str(workload.kind),
)
def test_a_request_yields_each_metric_that_the_workload_names(
    workload: Workload, runtime: TorchDecodingRuntime
) -> None:
    request = workload.prepare(runtime)
    assert request.check().problem is None
    assert set(request.run()) == set(workload.metrics)
    assert request.fresh(7).check().problem is None


@pytest.mark.parametrize("stack", [(), (StaticKvCache(),)], ids=["dynamic", "static"])
def test_kv_cache_times_tokens_at_its_position(stack: tuple[Technique, ...]) -> None:
    runtime = asked(runtime_of("path:llama", Positions(), *stack))
    KvCachePositions(positions=(24,), new_tokens=4, batch_size=2).prepare(runtime).run()
    assert runtime.notes.facts["positions"] == [24, 25, 26]


def test_kv_cache_leaves_the_prompt_out_of_a_token_s_time(
    runtime: TorchDecodingRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = KvCachePositions(positions=(8,), new_tokens=4, batch_size=2).prepare(runtime)
    monkeypatch.setattr(runtime, "generate", lambda prompt, _: Generation(prompt, [9.0, 0.1, 0.2, 0.3]))
    assert request.run() == pytest.approx({"tpot_s": 0.2, "tokens_per_s": 10.0})


def test_without_a_cache_every_token_runs_the_whole_sequence() -> None:
    runtime = asked(runtime_of("path:gpt2", NoKvCache()))
    lengths: list[int] = []

    def see(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        lengths.append(named["input_ids"].shape[1])

    runtime.decoding.model.register_forward_pre_hook(see, with_kwargs=True)
    KvCachePositions(positions=(24,), new_tokens=4).prepare(runtime).run()
    assert lengths == [24, 25, 26, 27]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_of_the_sweep_decodes_so_many_sequences(batch: int, runtime: TorchDecodingRuntime) -> None:
    request = BatchSweep(batch_sizes=(batch,), prompt_tokens=8, new_tokens=4).prepare(runtime)
    assert request.check().problem is None
    assert runtime.decoded == (batch, 12)


@pytest.mark.parametrize(
    ("workload", "fits"),
    [
        (KvCachePositions(positions=(8, 1008), new_tokens=16), True),
        (KvCachePositions(positions=(1009, 8), new_tokens=16), False),
        (BatchSweep(prompt_tokens=1000, new_tokens=24), True),
        (BatchSweep(prompt_tokens=1000, new_tokens=25), False),
        (Quality(window=1024), True),
        (Quality(window=1025), False),
    ],
)
def test_the_tokens_must_fit_the_context(workload: Workload, fits: bool) -> None:
    problem = workload.check(facts_of(parse_reference("preset:gpt2")))
    assert (problem is None) == fits
    if problem:
        assert problem.endswith("tokens; ask for fewer.")


@pytest.mark.parametrize(("batch", "scenario"), [(1, "SingleStream"), (2, "Offline")])
def test_generate_says_which_of_mlperfs_scenarios_it_is(
    batch: int, scenario: str, runtime: TorchDecodingRuntime
) -> None:
    workload = Generate(prompt_tokens=8, new_tokens=4, batch_size=batch)
    workload.prepare(runtime)
    assert workload.scenario == runtime.notes.facts["scenario"] == scenario
    assert "scenario" not in workload.model_dump(), "which would change every digest"


@pytest.mark.parametrize("stack", [(), (StaticKvCache(),), (NoKvCache(),)], ids=["dynamic", "static", "none"])
def test_quality_scores_each_token_of_a_window_but_those_of_its_prompt(stack: tuple[Technique, ...]) -> None:
    runtime = asked(runtime_of("path:llama", *stack))
    request = QUALITY.prepare(runtime)
    found = request.run()
    predicted = 2 * (16 - 1 - PREFILL_TOKENS)
    assert found["scored_tokens_per_s"] == pytest.approx(predicted / found["latency_s"])
    assert request.check().problem is None
    assert runtime.decoded == (2, 16)


def test_quality_goes_through_the_step_that_is_timed() -> None:
    runtime = asked(runtime_of("path:gpt2", Positions()))
    QUALITY.prepare(runtime).run()
    assert runtime.notes.facts["positions"] == list(range(PREFILL_TOKENS, 15))


def test_a_missing_prediction_and_a_wrong_logit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = asked(runtime_of("path:gpt2"))
    request, whole = QUALITY.prepare(runtime), runtime.score

    def short(tokens: Any, prefill: int) -> Iterator[Any]:
        yield from list(whole(tokens, prefill))[1:]

    def infinite(tokens: Any, prefill: int) -> Iterator[Any]:
        for index, logits in enumerate(whole(tokens, prefill)):
            yield np.full_like(logits, np.inf) if index == 3 else logits

    monkeypatch.setattr(runtime, "score", short)
    assert request.check().problem == "Scoring gave 6 predictions instead of 7."
    monkeypatch.setattr(runtime, "score", infinite)
    assert "NaN or infinite" in (request.check().problem or "")


@pytest.mark.usefixtures("trained_model")
class TestTheMeter:
    """What the quality meter finds where nothing but scoring was run."""

    MODEL = "path:trained"

    def context(self, folder: Path, *stack: Technique, **options: Any) -> MeterContext:
        runtime, workload = asked(runtime_of(self.MODEL, *stack)), Quality(window=32, batch_size=2)
        request = workload.prepare(runtime)
        request.check()
        return MeterContext(runtime, request, workload, self.MODEL, folder, 0, QualityOptions(**options))

    def test_fp32_does_not_diverge_and_spoiled_weights_do(self, tmp_path: Path) -> None:
        assert make_reference(self.context(tmp_path)).reasons == {}
        plain, rounded, spoiled = (
            QualityMeter().read(self.context(tmp_path, *stack)).values["kld_mean"]
            for stack in ((), (StaticKvCache(), Int8WeightOnly()), (Spoiled(noise=1.0),))
        )
        assert plain <= 1e-6 < rounded < 1e-3 < spoiled

    def test_the_meter_s_window_is_at_most_the_workload_s(self, tmp_path: Path) -> None:
        make_reference(self.context(tmp_path))
        facts = QualityMeter().read(self.context(tmp_path)).facts.model_dump()["quality"]
        assert (facts["window"], facts["batch_size"], facts["positions"]) == (32, 2, 512)
        reasons = make_reference(self.context(tmp_path, window=33)).reasons
        assert "quality.window is 33 tokens and the workload decodes 32" in reasons["kld_mean"]

    def test_the_workloads_of_a_job_share_the_reference_and_the_window_of_the_first(
        self, tmp_path: Path
    ) -> None:
        found: list[Reading] = []
        for workload in KvCachePositions(positions=(8, 32), new_tokens=8).expand():
            runtime = asked(runtime_of(self.MODEL))
            request = workload.prepare(runtime)
            request.check()
            context = MeterContext(runtime, request, workload, self.MODEL, tmp_path, 0, QualityOptions())
            if not found:
                make_reference(context)
            found.append(QualityMeter().read(context))
        assert [reading.values["top1_agreement"] for reading in found] == [1, 1]
        assert [reading.facts.model_dump()["quality"]["window"] for reading in found] == [16, 16]

    def test_a_loop_that_gives_no_logits_is_unsupported(self) -> None:
        request = QUALITY.prepare(asked(runtime_of(self.MODEL, OwnLoop(scores=False))))
        with pytest.raises(UnsupportedError, match="gives no logits"):
            request.check()
