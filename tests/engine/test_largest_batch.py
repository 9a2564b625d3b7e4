"""The plan batch_scaling: real processes that run out of memory and go on, and what its job ends with."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from optigpu.cli import app
from optigpu.conductor.largest_batch import LargestBatch, largest_batch
from optigpu.documents.events import Event, Finished, Planned, Progressed, VariantFinished, VariantStarted
from optigpu.job.plan import variants_of
from optigpu.job.replay import replay_request
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.report.tables import batch_grid
from optigpu.vocabulary import CancelledError, ReplicateError, SpecError, VariantStatus
from tests.engine.processes import program
from tests.engine.sessions import session_with

LLAMA = "preset:tiny-llama-test"
CHECKPOINTED = [{"name": "gradient_checkpointing"}]
LIMIT = 45_000_000
"""The arenas of threads take some megabytes of it, more or fewer from run to run, and one kind of CPU needs more than
another: 60 MB were enough for 23 rows on one and for 29 on the next."""


def job(**changes: Any) -> JobSpec:
    document = {"workload": {"kind": "train_step", "sequence_tokens": 64}, "model": LLAMA}
    limits = {"max_bytes": LIMIT, "max_batch": 64, "wait_for_quiet_s": 0} | changes.pop("limits", {})
    return JobSpec.model_validate(document | {"plan": "batch_scaling", "limits": limits} | changes)


def found_by(folder: Path, *arguments: object, most: int = 64) -> LargestBatch:
    spec = job(limits={"max_batch": most})
    session, _ = session_with(spec, folder, "batches", *arguments)
    (variant,) = variants_of(spec)
    return largest_batch(session, variant, program("batches", *arguments))


@pytest.mark.long
def test_a_job_ends_with_the_largest_batches_and_how_many_times_as_many_they_are(tmp_path: Path) -> None:
    events: list[Event] = []
    asked = job(stack=CHECKPOINTED, limits={"max_batch": 24})
    report = run(asked, events.append, lock_dir=tmp_path, threads=1)
    plain, checkpointed = (int(each.metrics["largest_batch"].value or 0) for each in report.results)
    assert 1 <= plain < checkpointed
    for result in report.results:
        assert result.verdict.valid
        assert result.variant.primary_metric == "largest_batch"
        assert result.variant.workload["memory_limit_bytes"] == LIMIT
        assert "batch_size" not in result.variant.workload
        tried = result.facts.recorded["batches_tried"]
        assert isinstance(tried, list)
        assert [1, True] in tried
        assert ([plain + 1, False] in tried) == (result.variant.index == 0), "memory ran out, and only there"
        assert result.provenance is not None
        assert result.provenance.weight_hash
    rows = report.attribution.rows
    assert report.attribution.metric == "largest_batch"
    assert rows[1].speedup is not None
    assert rows[1].speedup.ratio == pytest.approx(checkpointed / plain)
    assert batch_grid(report).rows[1][:3] == (
        "gradient_checkpointing",
        str(checkpointed),
        f"{checkpointed / plain:.2f}",
    )
    kinds = [type(event) for event in events]
    assert kinds[0] is Planned
    assert kinds[-1] is Finished
    assert kinds.count(VariantStarted) == kinds.count(VariantFinished) == 2
    fractions = [event.fraction for event in events if isinstance(event, Progressed)]
    assert fractions == sorted(fractions)
    _refuses_to_replay(report)


def _refuses_to_replay(report: Report) -> None:
    with pytest.raises(SpecError, match="post its job, or run batch-scaling, again"):
        replay_request(report.results[0].model_dump(mode="json"), None, {})


@pytest.mark.parametrize("how", ["dies", "recovers"])
@pytest.mark.parametrize(("bound", "most", "found"), [(0, 64, 0), (5, 64, 5), (64, 64, 64), (100, 64, 64)])
def test_bisection_finds_the_last_batch_that_fits(
    tmp_path: Path, bound: int, most: int, found: int, how: str
) -> None:
    measured = found_by(tmp_path, bound, how, most=most)
    assert measured.largest == found
    failed = sum(not fits for _, fits in measured.tried)
    assert measured.restarts == (failed if how == "dies" else 0)
    assert measured.facts.recorded == {"loaded": True}


def test_another_error_than_memory_is_told(tmp_path: Path) -> None:
    with pytest.raises(ReplicateError, match="A batch of 1 failed: no such thing"):
        found_by(tmp_path, -1, "recovers")


def test_cancelling_ends_an_attempt(tmp_path: Path) -> None:
    def cancelled(events: list[Event]) -> str | None:
        hangs = any(isinstance(event, Progressed) and event.doing == "hanging" for event in events)
        return "enough" if hangs else None

    spec = job()
    session, _ = session_with(spec, tmp_path, "batches", cancelled=cancelled)
    with pytest.raises(CancelledError, match="enough"):
        largest_batch(session, variants_of(spec)[0], program("batches", 1, "hangs"))


@pytest.mark.slow
def test_where_not_even_one_sample_fits_the_variant_says_why(tmp_path: Path) -> None:
    report = run(job(limits={"max_bytes": 1_000_000}), lambda _: None, lock_dir=tmp_path)
    (outcome,) = report.outcomes
    assert outcome.status is VariantStatus.FAILED
    assert "Not even a batch of 1 found enough memory under 1000000 bytes" in str(outcome.reason)


def test_each_limit_has_a_board_of_its_own_and_a_speed_has_another() -> None:
    one, other = (variants_of(job(limits={"max_bytes": size}))[0] for size in (1e9, 2e9))
    timed = variants_of(JobSpec.model_validate({"workload": {"kind": "train_step"}, "model": LLAMA}))[0]
    assert len({one.workload_digest, other.workload_digest, timed.workload_digest}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": {"max_bytes": None}}, "batch_scaling needs the memory that it may take"),
        ({"workload": {"kind": "batch_sweep"}, "model": "bundled:tiny"}, "batch_sweep has no batch to scale"),
        ({"workload": {"kind": "train_step", "batch_size": 8}}, "batch_scaling looks for it; leave it out"),
        ({"workload": {"kind": "generate"}, "backend": "llama_cpp"}, "limits the memory of torch alone"),
        (
            {"workload": {"kind": "generate"}, "model": "bundled:tiny", "limits": {"max_kld": 0.1}},
            "batch_scaling measures no quality",
        ),
    ],
)
def test_what_the_plan_cannot_mean_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        job(**changes)


@pytest.mark.slow
def test_the_command_is_a_client_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    asked = ["batch-scaling", "--limit", f"{LIMIT}B", "--model", LLAMA, "--tokens", "64", "--most", "2"]
    made = CliRunner().invoke(app, [*asked, "--stack", "", "--device", "cpu", "--format", "json"])
    assert made.exit_code == 0, made.output
    document = json.loads(made.stdout)
    assert document["spec"]["plan"] == "batch_scaling"
    assert document["spec"]["limits"]["max_bytes"] == LIMIT
    (result,) = document["results"]
    assert result["metrics"]["largest_batch"]["reason"] == "2 is the most that limits.max_batch lets it try."
