"""Every workload as a measuring process runs it, what requests of decoding are, and what their checks find."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.child.messages import Metered, Ready, Round, RunMeter, RunRound
from optigpu.documents.events import Event, VariantFinished
from optigpu.documents.result import Outcome, Verdict
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.report.ladder import ladder_grid
from optigpu.techniques.base import Technique
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.workloads import WORKLOADS
from optigpu.workloads.kv_cache import KvCachePositions
from optigpu.workloads.quality import PREFILL_TOKENS, Quality
from tests.engine.measuring import in_process
from tests.engine.meter_contexts import Spoiled, Spy
from tests.engine.processes import optigpu, program
from tests.engine.sessions import AT_ONCE
from tests.engine.test_cli_run import MEASURED, QUICK
from tests.engine.test_replicate import answer, ask, assignment
from tests.engine.tiny_models import asked, runtime_of

pytestmark = pytest.mark.usefixtures("forked_children")
TEXT, IMAGES = "preset:tiny-llama-test", "preset:tiny-vit-test"
TINY: dict[str, tuple[dict[str, Any], str | None]] = {
    "prefill": ({"prompt_tokens": 8}, TEXT),
    "kv_cache": ({"positions": [8], "new_tokens": 4}, TEXT),
    "batch_sweep": ({"batch_sizes": [2], "prompt_tokens": 8, "new_tokens": 4}, TEXT),
    "attention": ({"lengths": [32], "implementations": ["fused"]}, None),
    "normalization": ({"widths": [64], "norms": ["rms_norm"], "implementations": ["standard"]}, None),
}
"""Of each workload that is in no job below or elsewhere: its shapes, and a model."""

METERS = ("--meters", "latency,quality")


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY)
def test_it_is_prepared_timed_and_weighed(kind: str) -> None:
    """Whose process it is makes no difference to a workload; test_replicate.py and the jobs have processes."""
    shapes, model = TINY[kind]
    with in_process() as child:
        child.tell(assignment({"kind": kind} | shapes, model))
        ready = answer(child)
        assert isinstance(ready, Ready), ready
        assert ready.problem is None
        assert (ready.facts.footprint is not None) == (model is not None)
        heard = ask(child, RunRound(seconds=0, min_requests=2))
        assert isinstance(heard, Round)
        assert {name: len(values) for name, values in heard.samples.items()} == dict.fromkeys(
            WORKLOADS[kind].metrics, 2
        )
        metered = ask(child, RunMeter(meter="memory"))
        assert isinstance(metered, Metered)
        assert metered.values["host_peak_bytes"] > 0
        assert ("peak_bytes" in metered.values) == (model is None)


@pytest.mark.slow
def test_quality_by_itself_is_a_job(tmp_path: Path) -> None:
    measure = {
        "replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency", "quality"],
        "quality": {"tokens": 64},
    }  # fmt: skip
    workload = {"kind": "quality", "window": 16, "batch_size": 2}
    job = {"workload": workload, "model": "bundled:tiny", "measure": measure, "limits": AT_ONCE}
    spec = JobSpec.model_validate(job)
    (result,) = run(spec, lambda _: None, lock_dir=tmp_path).results
    values = {name: summary.value for name, summary in result.metrics.items()}
    assert 0 <= (values["kld_mean"] or 0) <= 1e-6
    assert (values["top1_agreement"], values["mbu"]) == (1, None)
    assert (values["scored_tokens_per_s"] or 0) > 0
    assert "quality" in (result.metrics["mbu"].reason or "")


@pytest.mark.slow
def test_the_speedup_of_fused_attention_at_each_length_comes_out_of_one_job(tmp_path: Path) -> None:
    """Attribution counts every result as valid, whoever else uses this machine while the test runs."""
    measure = {"replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency"]}
    workload = {
        "kind": "attention",
        "lengths": [64, 512],
        "heads": 2,
        "implementations": ["standard", "fused"],
    }
    spec = JobSpec.model_validate({"workload": workload, "measure": measure, "limits": AT_ONCE})
    outcomes: dict[int, Outcome] = {}

    def listen(event: Event) -> None:
        if isinstance(event, VariantFinished):
            outcomes[event.outcome.index] = as_valid(event.outcome)

    results = run(spec, listen, lock_dir=tmp_path, program=program("operators")).results
    attribution = attribute(spec, variants_of(spec), outcomes)
    rows = {row.label: row for row in attribution.rows}
    for length in (64, 512):
        standard, fused = rows[f"standard {length}"], rows[f"fused {length}"]
        assert standard.speedup is None
        assert fused.speedup is not None
        assert fused.speedup.compared_with == standard.index
        slow, fast = (results[row.index].metrics["tflops"].value or 0 for row in (standard, fused))
        assert fused.speedup.ratio == pytest.approx(fast / slow)
        assert fused.speedup.ratio == pytest.approx(2)
    together = [result.variant.workload_digest for result in results]
    assert together[0] == together[1] != together[2] == together[3]
    assert len({result.variant.variant_digest for result in results}) == 4
    table = ladder_grid("attention", attribution, [result.model_dump(mode="json") for result in results])
    column = [each.heading for each in table.columns].index("speedup")
    assert [bool(row[column]) for row in table.rows] == [False, True, False, True]


def as_valid(outcome: Outcome) -> Outcome:
    assert outcome.result is not None
    return outcome.model_copy(
        update={"result": outcome.result.model_copy(update={"verdict": Verdict(valid=True)})}
    )


@pytest.mark.slow
def test_the_command_line_classifies_with_a_roofline(tmp_path: Path) -> None:
    ran = optigpu(
        {"OPTIGPU_DATA_DIR": str(tmp_path)},
        "run",
        "--workload",
        "classify",
        "--model",
        IMAGES,
        *QUICK,
        *METERS,
        "--format",
        "json",
    )
    assert ran.returncode in MEASURED, ran.stderr
    (result,) = json.loads(ran.stdout)["results"]
    assert result["metrics"]["images_per_s"]["value"] > 0
    assert result["metrics"]["mfu"]["value"] > 0
    assert result["facts"]["roofline"]["step"]["name"] == "pass"
    assert "random" in result["metrics"]["kld_mean"]["reason"]


QUALITY = Quality(window=16, batch_size=2)


@pytest.mark.usefixtures("models_dir")
@pytest.mark.parametrize("stack", [(), (StaticKvCache(),)], ids=["dynamic", "static"])
def test_kv_cache_times_tokens_at_its_position(stack: tuple[Technique, ...]) -> None:
    runtime = asked(runtime_of("path:llama", Spy(), *stack))
    KvCachePositions(positions=(24,), new_tokens=4, batch_size=2).prepare(runtime).run()
    assert [position for _, position, _ in runtime.notes.facts["seen"]] == [24, 25, 26]


@pytest.mark.usefixtures("models_dir")
@pytest.mark.parametrize("stack", [(), (StaticKvCache(),), (NoKvCache(),)], ids=["dynamic", "static", "none"])
def test_quality_scores_each_token_of_a_window_but_those_of_its_prompt(stack: tuple[Technique, ...]) -> None:
    runtime = asked(runtime_of("path:llama", *stack))
    request = QUALITY.prepare(runtime)
    found = request.run()
    predicted = 2 * (16 - 1 - PREFILL_TOKENS)
    assert found["scored_tokens_per_s"] == pytest.approx(predicted / found["latency_s"])
    assert request.check().problem is None
    assert runtime.decoded == (2, 16)


@pytest.mark.usefixtures("models_dir")
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

    @pytest.mark.slow
    def test_fp32_does_not_diverge_and_spoiled_weights_do(self, tmp_path: Path) -> None:
        assert make_reference(self.context(tmp_path)).reasons == {}
        plain, rounded, spoiled = (
            QualityMeter().read(self.context(tmp_path, *stack)).values["kld_mean"]
            for stack in ((), (StaticKvCache(), Int8WeightOnly()), (Spoiled(noise=1.0),))
        )
        assert plain <= 1e-6 < rounded < 1e-3 < spoiled
