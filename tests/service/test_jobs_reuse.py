"""Results that are there already: when a job is answered from them, and when it is measured."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

from optigpu.documents.result import Attribution, AttributionRow, VerdictWarning
from optigpu.job.measured import as_measured
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.store import jobs, outcomes, withdrawals, workers
from optigpu.store.database import Database
from optigpu.store.jobs import Submitted
from optigpu.store.withdrawals import Withdrawal
from optigpu.vocabulary import JobState, VariantStatus
from tests.service.records import a_plan, a_result, a_spec, a_worker, an_outcome, claimed

SOFTWARE = {"optigpu": "1", "torch": "2.13.0"}
LADDER = {
    "workload": {"kind": "generate"},
    "model": "preset:gpt2",
    "stack": [{"name": "bf16"}],
    "plan": "ladder",
}


def serving(session: Session, name: str = "worker-1", **changes: Any) -> None:
    workers.register(session, a_worker(name, **({"software": SOFTWARE} | changes)))


def measured(session: Session, spec: JobSpec, **changes: Any) -> str:
    """A job that a worker has measured, with results of its variants' own digests."""
    job_id = jobs.submit(session, spec, fresh=True).job.id
    lease = claimed(session)
    variants = variants_of(spec)
    outcomes.plan(session, lease, a_plan(*(variant.label for variant in variants)))
    for variant in variants:
        outcomes.save_outcome(session, lease, an_outcome(result_of(spec, variant, **changes)))
    rows = tuple(
        AttributionRow(index=v.index, role=v.role, label=v.label, status=VariantStatus.SUCCEEDED)
        for v in variants
    )
    outcomes.finish(session, lease, JobState.SUCCEEDED, None, Attribution(metric=spec.primary, rows=rows))
    return job_id


def result_of(spec: JobSpec, variant: Variant, **changes: Any) -> Any:
    known = as_measured(variant)
    assert known is not None
    fields: dict[str, Any] = {
        "warnings": (),
        "software": SOFTWARE,
        "seed": spec.seed,
        "index": variant.index,
    } | changes
    made = a_result(workload=variant.workload.kind, **fields)
    digests = {"workload_digest": known.workload_digest, "variant_digest": known.digest}
    return made.model_copy(update={"variant": made.variant.model_copy(update=digests)})


def posted(session: Session, spec: JobSpec) -> Submitted:
    return jobs.submit(session, spec)


OTHERWISE: dict[str, dict[str, Any]] = {
    "fresh": {"fresh": True},
    "another seed": {"seed": 1},
    "another shape": {"workload": {"kind": "matmul", "sizes": [65]}},
    "more processes": {"measure": {"replicates": 5}},
    "another meter": {"measure": {"meters": ["latency", "profile"]}},
}


@pytest.mark.parametrize("change", OTHERWISE.values(), ids=OTHERWISE)
def test_what_is_not_the_same_is_measured(database: Database, change: dict[str, Any]) -> None:
    with database.write() as session:
        serving(session)
        measured(session, a_spec())
        assert posted(session, a_spec(**change)).job.state is JobState.QUEUED


RESULTS: dict[str, dict[str, Any]] = {
    "invalid": {"valid": False},
    "incomplete": {"warnings": (VerdictWarning.INCOMPLETE,)},
    "another class": {"hardware": "1x Other CPU"},
    "other versions": {"software": SOFTWARE | {"torch": "2.12.0"}},
}


@pytest.mark.parametrize("change", RESULTS.values(), ids=RESULTS)
def test_a_result_that_does_not_hold_here_is_no_answer(database: Database, change: dict[str, Any]) -> None:
    with database.write() as session:
        serving(session)
        measured(session, a_spec(), **change)
        assert posted(session, a_spec()).job.state is JobState.QUEUED


def test_nothing_is_answered_while_it_is_not_known_where_it_would_be_measured(database: Database) -> None:
    with database.write() as session:
        measured(session, a_spec())
        assert posted(session, a_spec()).job.state is JobState.QUEUED, "no worker"
        serving(session)
        serving(session, "other", hardware_class="1x Other CPU")
        assert posted(session, a_spec()).job.state is JobState.QUEUED, "two classes"
        workers.leave(session, "other")
        assert posted(session, a_spec()).job.state is JobState.SUCCEEDED


def test_less_is_answered_from_more(database: Database) -> None:
    with database.write() as session:
        serving(session)
        measured(session, a_spec(measure={"replicates": 5}))
        assert posted(session, a_spec(measure={"meters": ["latency"]})).job.state is JobState.SUCCEEDED


def test_a_ladder_is_answered_whole_from_one_job_and_one_rung_from_a_ladder(database: Database) -> None:
    ladder = a_spec(**LADDER)
    rung = a_spec(**(LADDER | {"plan": "single"}))
    with database.write() as session:
        serving(session)
        measured(session, rung)
        assert posted(session, ladder).job.state is JobState.QUEUED
        jobs.request_cancel(session, jobs.list_(session).jobs[0].id)
        first = measured(session, ladder)
        answered = posted(session, ladder).job
        one = posted(session, rung).job
    assert (answered.state, one.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
    assert {variant.reused.job_id for variant in answered.variants if variant.reused} == {first}
    assert len(answered.variants) == len(variants_of(ladder))


def test_a_result_that_is_withdrawn_leaves_the_jobs_that_it_answered(database: Database) -> None:
    with database.write() as session:
        serving(session)
        measured(session, a_spec())
        answered = posted(session, a_spec()).job
        result_id = answered.variants[0].result_id
        assert result_id is not None
        withdrawals.withdraw_result(session, result_id, Withdrawal(reason="wrong", withdrawn_by="alice"))
        (variant,) = jobs.get(session, answered.id).variants
        assert posted(session, a_spec()).job.state is JobState.QUEUED
    assert (variant.result_id, variant.reused) == (None, None)
    assert "withdrawn" in (variant.reason or "")


def test_the_weights_of_the_bundled_model_are_known_and_those_of_folders_are_not() -> None:
    generate = {"workload": {"kind": "generate"}}
    (bundled,) = variants_of(a_spec(**generate, model="bundled:tiny"))
    known = as_measured(bundled)
    assert known is not None
    assert known.weights
    assert known.digest != bundled.digest
    (folder,) = variants_of(a_spec(**generate, model="path:mine"))
    assert as_measured(folder) is None
