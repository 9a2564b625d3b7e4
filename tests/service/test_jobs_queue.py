"""Whose turn it is, when a job will begin, what follows when an attempt fails, and when a job is answered from results
that are there already."""

import sqlite3
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from optigpu.documents.result import Attribution, AttributionRow, VerdictWarning
from optigpu.job.measured import as_measured
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.store import jobs, leases, outcomes, queue, withdrawals, workers
from optigpu.store.database import Database
from optigpu.store.jobs import Submitted
from optigpu.store.tables import Job
from optigpu.store.transitions import RETRIES
from optigpu.store.withdrawals import Withdrawal
from optigpu.vocabulary import FailureKind, JobState, VariantStatus, utc_now
from tests.service.pages import HTML
from tests.service.records import a_failure, a_plan, a_result, a_spec, a_worker, an_outcome, claimed
from tests.service.serving import Served

HOUR = timedelta(hours=1)
LATER = timedelta(days=1)


def posted(session: Session, owner: str = "open", **fields: object) -> str:
    return jobs.submit(session, a_spec(**fields), owner=owner).job.id


def test_a_higher_priority_goes_first_and_a_lower_one_last(database: Database) -> None:
    with database.write() as session:
        low, usual, high = (posted(session, priority=each) for each in (-1, 0, 3))
        places = [jobs.get(session, job_id).queue_position for job_id in (low, usual, high)]
        assert [claimed(session).job_id for _ in range(3)] == [high, usual, low]
    assert places == [3, 2, 1]


def test_keys_take_turns_and_the_place_of_each_job_says_so(database: Database) -> None:
    """One key posts many jobs before another posts two."""
    with database.write() as session:
        many = [posted(session, "many") for _ in range(4)]
        few = [posted(session, "few") for _ in range(2)]
        places = {jobs.get(session, job_id).queue_position: job_id for job_id in (*many, *few)}
        taken = [claimed(session, a_worker(f"worker-{number}")).job_id for number in range(6)]
    assert taken == [many[0], few[0], many[1], few[1], many[2], many[3]]
    assert [places[number] for number in range(1, 7)] == taken


def test_a_key_that_had_much_of_the_last_hour_waits_and_older_use_is_forgotten(database: Database) -> None:
    now = utc_now()
    with database.write() as session:
        posted(session, "busy")
        lease = claimed(session, now=now - HOUR / 2)
        outcomes.finish(session, lease, JobState.SUCCEEDED)
        older, newer = posted(session, "busy"), posted(session, "idle")
        first, second = claimed(session), claimed(session)
        assert [first.job_id, second.job_id] == [newer, older]
        for each in (first, second):
            leases.release(session, each)
        assert claimed(session, now=now + 2 * HOUR).job_id == older


def test_a_message_s_job_goes_before_others_of_its_key_and_before_no_other(database: Database) -> None:
    with database.write() as session:
        first, second = posted(session), posted(session)
        urgent = posted(session, priority=1)
        assert claimed(session, asked=second).job_id == urgent
        assert claimed(session, asked=second).job_id == second
        assert claimed(session, asked=second).job_id == first, "a repeated message: the job runs already"
        assert leases.claim(session, a_worker(), 30, asked=second) is None


def test_a_worker_passes_over_the_jobs_of_a_key_that_it_cannot_run(database: Database) -> None:
    with database.write() as session:
        for _ in range(3):
            posted(session, "alien", device="cuda")
            posted(session, "alien", workload={"kind": "generate"}, model="path:elsewhere")
        mine = posted(session, "mine", priority=-5)
        assert claimed(session).job_id == mine
        assert leases.claim(session, a_worker(), 30) is None


def test_when_a_job_begins_is_reckoned_from_the_latest_like_it(database: Database) -> None:
    with database.write() as session:
        workers.register(session, a_worker())
        waits = posted(session, fresh=True)
        assert jobs.get(session, waits).estimated_start_at is None, "nothing is known of such jobs"
        lease = claimed(session, now=utc_now() - timedelta(seconds=600))
        outcomes.finish(session, lease, JobState.SUCCEEDED)
        ahead, last = posted(session), posted(session)
        now = utc_now()
        begins = [jobs.get(session, job_id).estimated_start_at for job_id in (ahead, last)]
        assert begins[0] is not None
        assert begins[1] is not None
        assert abs(begins[0] - now) < timedelta(seconds=60), "a worker is idle"
        workers.seen(session, "worker-1", claimed(session).job_id)
        begins = [jobs.get(session, job_id).estimated_start_at for job_id in (ahead, last)]
    assert begins[0] is None, "it runs"
    assert begins[1] is not None
    assert timedelta(seconds=240) < begins[1] - now < timedelta(seconds=360), "half of the one that runs"


def test_a_job_whose_deadline_passed_before_it_began_fails(database: Database) -> None:
    deadline = utc_now() + HOUR
    with database.write() as session:
        late = posted(session, limits={"deadline": deadline.isoformat()})
        usual = posted(session)
        after = deadline + timedelta(seconds=1)
        assert queue.counts(session)[JobState.QUEUED] == 2
        lease = claimed(session, now=after)
        assert lease.job_id == usual
        assert leases.sweep(session, deadline - HOUR).overdue == ()
        assert leases.sweep(session, after).overdue == (late,)
        job = jobs.get(session, late)
    assert (job.state, job.parked) == (JobState.FAILED, False)
    assert (job.reason or "").startswith(f"The deadline ({deadline:%Y-%m-%d %H:%M:%S} UTC) passed")


def test_jobs_of_one_key_are_taken_by_age_whatever_they_ask_for(database: Database) -> None:
    """They are of several lanes; the last two are from before there were any."""
    with database.write() as session:
        model: dict[str, object] = {"workload": {"kind": "generate"}, "model": "path:elsewhere"}
        plain: dict[str, object] = {}
        made = [posted(session, "open", **fields) for fields in (plain, model) * 3]
        lanes = dict(session.execute(select(Job.id, Job.lane)).all())
        assert len(set(lanes.values())) == 2
        session.execute(update(Job).where(Job.id.in_(made[-2:])).values(lane=None))
        worker = a_worker(packages=("transformers",), models=("path:elsewhere",))
        taken = []
        while lease := leases.claim(session, worker, 30):
            taken.append(lease.job_id)
    assert taken == made


@pytest.mark.slow
def test_a_claim_reads_no_more_where_more_jobs_wait_that_the_worker_cannot_run(database: Database) -> None:
    """Steps of the database's machine are counted, which only SQLite does; the statement is the same on both."""
    steps: list[int] = []
    for more in (50, 500):
        with database.write() as session:
            for _ in range(more):
                posted(session, workload={"kind": "generate"}, model="path:elsewhere")
            wanted = posted(session)
        with database.write() as session:
            if database.dialect == "sqlite":
                steps.append(_steps(session, wanted))
            else:
                assert claimed(session).job_id == wanted
    if steps:
        assert steps[1] < 1.5 * steps[0]


def _steps(session: Session, wanted: str) -> int:
    """Hundreds of instructions that SQLite needs for a claim, which takes that job."""
    hundreds = 0

    def count() -> int:
        nonlocal hundreds
        hundreds += 1
        return 0

    connection = session.connection().connection.driver_connection
    assert isinstance(connection, sqlite3.Connection)
    connection.set_progress_handler(count, 100)
    assert claimed(session).job_id == wanted
    connection.set_progress_handler(None, 0)
    return hundreds


def parked(session: Session) -> str:
    """A job that was parked after its first attempt."""
    job_id = jobs.submit(session, a_spec()).job.id
    leases.fail(session, claimed(session, now=utc_now() + LATER), FailureKind.BROKEN, "The worker failed.")
    return job_id


@pytest.mark.parametrize("kind", FailureKind)
def test_each_kind_of_failure_is_tried_again_as_often_as_its_policy_says(
    database: Database, kind: FailureKind
) -> None:
    policy = RETRIES[kind]
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        for wait_s in policy.waits_s:
            leases.fail(session, claimed(session, now=utc_now() + LATER), kind, "It failed.")
            job = jobs.get(session, job_id)
            assert (job.state, job.failure, job.parked) == (JobState.QUEUED, kind, False)
            assert (job.not_before is not None) == (wait_s > 0)
            assert (job.reason or "").startswith("It failed. It is tried again")
        leases.fail(session, claimed(session, now=utc_now() + LATER), kind, "It failed.")
        job = jobs.get(session, job_id)
    assert (job.state, job.reason, job.failure) == (JobState.FAILED, "It failed.", kind)
    assert job.parked == policy.parks
    assert [attempt.outcome for attempt in job.attempts] == [kind.value] * len(policy.waits_s) + ["failed"]


def test_a_job_that_waits_is_taken_by_nobody_and_holds_up_no_other(database: Database) -> None:
    with database.write() as session:
        poison = jobs.submit(session, a_spec()).job.id
        lease = claimed(session)
        leases.fail(session, lease, FailureKind.OUT_OF_MEMORY, "No memory.")
        other = jobs.submit(session, a_spec()).job.id
        lease = claimed(session)
        assert lease.job_id == other
        assert leases.claim(session, a_worker(), 30) is None
        assert claimed(session, now=utc_now() + LATER).job_id == poison


def test_what_failed_for_want_of_memory_is_measured_again_and_what_succeeded_is_not(
    database: Database,
) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = claimed(session, now=utc_now() + LATER)
        outcomes.plan(session, lease, a_plan("baseline", "bf16"))
        outcomes.save_outcome(session, lease, an_outcome(a_result()))
        outcomes.save_outcome(session, lease, a_failure(index=1))
        leases.fail(session, lease, FailureKind.OUT_OF_MEMORY, "No memory.")
        statuses = [variant.status for variant in jobs.get(session, job_id).variants]
        assert claimed(session, now=utc_now() + LATER).done == (0,)
    assert statuses == [VariantStatus.SUCCEEDED, VariantStatus.PENDING]


@pytest.mark.slow
def test_a_parked_job_that_is_put_back_has_a_clean_slate(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        for _ in range(3):
            leases.fail(session, claimed(session, now=utc_now() + LATER), FailureKind.LOST, "It was lost.")
        assert [job.id for job in jobs.list_(session, parked=True).jobs] == [job_id]
        job = jobs.retry(session, job_id)
        assert (job.state, job.parked, job.failure, job.reason) == (JobState.QUEUED, False, None, None)
        assert jobs.retry(session, job_id).state is JobState.QUEUED, "again changes nothing"
        leases.fail(session, claimed(session, now=utc_now() + LATER), FailureKind.LOST, "It was lost.")
        assert jobs.get(session, job_id).state is JobState.QUEUED, "it is counted anew"
        assert jobs.list_(session, parked=True).jobs == ()


@pytest.mark.slow
def test_parked_jobs_are_listed_and_put_back_over_http(service: Served) -> None:
    with service.database.write() as session:
        job_id = parked(session)
    service.submit()
    listed = service.client.get("/v1/jobs", params={"parked": "true"}).json()["jobs"]
    assert [(job["id"], job["reason"]) for job in listed] == [(job_id, "The worker failed.")]
    back = service.client.post(listed[0]["links"]["retry"])
    assert (back.status_code, back.json()["state"]) == (200, "queued")
    assert service.client.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    refused = service.client.post(f"/v1/jobs/{job_id}/retry")
    assert refused.status_code == 409
    assert refused.headers["content-type"] == "application/problem+json"


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


def asked_for(session: Session, spec: JobSpec) -> Submitted:
    return jobs.submit(session, spec)


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fresh": ({"fresh": True}, {}),
    "another seed": ({"seed": 1}, {}),
    "another shape": ({"workload": {"kind": "matmul", "sizes": [65]}}, {}),
    "more processes": ({"measure": {"replicates": 5}}, {}),
    "another meter": ({"measure": {"meters": ["latency", "profile"]}}, {}),
    "invalid": ({}, {"valid": False}),
    "incomplete": ({}, {"warnings": (VerdictWarning.INCOMPLETE,)}),
    "another class": ({}, {"hardware": "1x Other CPU"}),
    "other versions": ({}, {"software": SOFTWARE | {"torch": "2.12.0"}}),
}


@pytest.mark.parametrize(("asked", "known"), OTHERWISE.values(), ids=OTHERWISE)
def test_what_is_not_the_same_or_has_no_result_that_holds_here_is_measured(
    database: Database, asked: dict[str, Any], known: dict[str, Any]
) -> None:
    with database.write() as session:
        serving(session)
        measured(session, a_spec(), **known)
        assert asked_for(session, a_spec(**asked)).job.state is JobState.QUEUED


def test_nothing_is_answered_while_it_is_not_known_where_it_would_be_measured(database: Database) -> None:
    with database.write() as session:
        measured(session, a_spec())
        assert asked_for(session, a_spec()).job.state is JobState.QUEUED, "no worker"
        serving(session)
        serving(session, "other", hardware_class="1x Other CPU")
        assert asked_for(session, a_spec()).job.state is JobState.QUEUED, "two classes"
        workers.leave(session, "other")
        assert asked_for(session, a_spec()).job.state is JobState.SUCCEEDED


def test_less_is_answered_from_more(database: Database) -> None:
    with database.write() as session:
        serving(session)
        measured(session, a_spec(measure={"replicates": 5}))
        assert asked_for(session, a_spec(measure={"meters": ["latency"]})).job.state is JobState.SUCCEEDED


def test_a_ladder_is_answered_whole_from_one_job_and_one_rung_from_a_ladder(database: Database) -> None:
    ladder = a_spec(**LADDER)
    rung = a_spec(**(LADDER | {"plan": "single"}))
    with database.write() as session:
        serving(session)
        measured(session, rung)
        assert asked_for(session, ladder).job.state is JobState.QUEUED
        jobs.request_cancel(session, jobs.list_(session).jobs[0].id)
        first = measured(session, ladder)
        answered = asked_for(session, ladder).job
        one = asked_for(session, rung).job
    assert (answered.state, one.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
    assert {variant.reused.job_id for variant in answered.variants if variant.reused} == {first}
    assert len(answered.variants) == len(variants_of(ladder))


def test_the_page_of_a_job_shows_what_another_job_measured_at_another_place_of_its_plan(
    service: Served,
) -> None:
    with service.database.write() as session:
        serving(session)
        measured(session, a_spec(**LADDER))
        answered = asked_for(session, a_spec(**(LADDER | {"plan": "single"}))).job
    assert answered.variants[0].reused
    page = service.client.get(f"/jobs/{answered.id}", headers=HTML).text
    assert '<td data-label="tokens/s" class="right">100 ±1%</td>' in page
    assert "x</td>" not in page


def test_a_result_that_is_withdrawn_leaves_the_jobs_that_it_answered(database: Database) -> None:
    with database.write() as session:
        serving(session)
        measured(session, a_spec())
        answered = asked_for(session, a_spec()).job
        result_id = answered.variants[0].result_id
        assert result_id is not None
        withdrawals.withdraw_result(session, result_id, Withdrawal(reason="wrong", withdrawn_by="alice"))
        (variant,) = jobs.get(session, answered.id).variants
        assert asked_for(session, a_spec()).job.state is JobState.QUEUED
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
