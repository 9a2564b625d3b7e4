"""Every workload as a measuring process runs it, and some through the whole of a job."""

import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.child.messages import Metered, Ready, Round, RunMeter, RunRound
from optigpu.documents.events import Event, VariantFinished
from optigpu.documents.result import Outcome, Verdict
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.report.ladder import ladder_grid
from optigpu.workloads import WORKLOADS
from tests.engine.command import optigpu
from tests.engine.in_process import in_process
from tests.engine.processes import program
from tests.engine.test_cli_run import MEASURED, QUICK, environment
from tests.engine.test_replicate import answer, ask, assignment

pytestmark = pytest.mark.usefixtures("forked_children")

__all__ = ["environment"]

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
AT_ONCE = {"wait_for_quiet_s": 0}


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
def test_the_command_line_classifies_with_a_roofline(environment: dict[str, str]) -> None:
    ran = optigpu(
        environment, "run", "--workload", "classify", "--model", IMAGES, *QUICK, *METERS, "--format", "json"
    )
    assert ran.returncode in MEASURED, ran.stderr
    (result,) = json.loads(ran.stdout)["results"]
    assert result["metrics"]["images_per_s"]["value"] > 0
    assert result["metrics"]["mfu"]["value"] > 0
    assert result["facts"]["roofline"]["step"]["name"] == "pass"
    assert "random" in result["metrics"]["kld_mean"]["reason"]
