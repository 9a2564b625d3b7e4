"""Every workload in a real measuring process, and some through the whole of a job."""

import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.child.messages import Metered, Ready, Round, RunMeter, RunRound
from optigpu.job.spec import JobSpec
from optigpu.run import run
from optigpu.workloads import WORKLOADS
from tests.engine.test_cli_run import QUICK, environment, optigpu
from tests.engine.test_replicate import answer, ask, assignment, child_with

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


@pytest.mark.parametrize("kind", TINY)
def test_a_process_prepares_times_and_weighs_it(kind: str) -> None:
    shapes, model = TINY[kind]
    with child_with(assignment({"kind": kind} | shapes, model)) as child:
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
        assert child.end(10) == 0


def test_quality_by_itself_is_a_job(tmp_path: Path) -> None:
    measure = {
        "replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency", "quality"],
        "quality": {"tokens": 64},
    }  # fmt: skip
    workload = {"kind": "quality", "window": 16, "batch_size": 2}
    spec = JobSpec.model_validate({"workload": workload, "model": "bundled:tiny", "measure": measure})
    (result,) = run(spec, lambda _: None, lock_dir=tmp_path).results
    values = {name: summary.value for name, summary in result.metrics.items()}
    assert 0 <= (values["kld_mean"] or 0) <= 1e-6
    assert (values["top1_agreement"], values["mbu"]) == (1, None)
    assert (values["scored_tokens_per_s"] or 0) > 0
    assert "quality" in (result.metrics["mbu"].reason or "")


def test_the_speedup_of_fused_attention_at_each_length_comes_out_of_one_job(tmp_path: Path) -> None:
    measure = {"replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency"]}
    workload = {
        "kind": "attention",
        "lengths": [64, 512],
        "heads": 2,
        "implementations": ["standard", "fused"],
    }
    spec = JobSpec.model_validate({"workload": workload, "measure": measure})
    report = run(spec, lambda _: None, lock_dir=tmp_path)
    rows = {row.label: row for row in report.attribution.rows}
    for length in (64, 512):
        standard, fused = rows[f"standard {length}"], rows[f"fused {length}"]
        assert standard.speedup is None
        assert fused.speedup is not None
        assert fused.speedup.compared_with == standard.index
        times = [report.results[row.index].metrics["latency_s"].value or 0 for row in (standard, fused)]
        assert fused.speedup.ratio == pytest.approx(times[0] / times[1], rel=0.5)
    ranked_together = [result.variant.workload_digest for result in report.results]
    assert ranked_together[0] == ranked_together[1] != ranked_together[2] == ranked_together[3]
    assert len({result.variant.variant_digest for result in report.results}) == 4


def test_the_command_line_classifies_with_a_roofline(environment: dict[str, str]) -> None:
    ran = optigpu(environment, "run", "--workload", "classify", "--model", IMAGES, *QUICK, "--json")
    assert ran.returncode == 0, ran.stderr
    (result,) = json.loads(ran.stdout)["results"]
    assert result["metrics"]["images_per_s"]["value"] > 0
    assert result["metrics"]["mfu"]["value"] > 0
    assert result["facts"]["roofline"]["step"]["name"] == "pass"
    assert "random" in result["metrics"]["kld_mean"]["reason"]
