"""What follows when an attempt fails, by what it failed of; jobs that are parked and put back."""

from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

from optigpu.store import jobs, leases, outcomes
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.store.retries import RETRIES
from optigpu.vocabulary import ConflictError, FailureKind, JobState, VariantStatus, utc_now
from tests.service.records import a_failure, a_plan, a_result, a_spec, a_worker, an_outcome
from tests.service.serving import Served

LATER = timedelta(days=1)


def claimed(session: Session) -> Lease:
    lease = leases.claim(session, a_worker(), 30, utc_now() + LATER)
    assert lease is not None
    return lease


def parked(session: Session) -> str:
    """A job that was parked after its first attempt."""
    job_id = jobs.submit(session, a_spec()).job.id
    leases.fail(session, claimed(session), FailureKind.BROKEN, "The worker failed.")
    return job_id


@pytest.mark.parametrize("kind", FailureKind)
def test_each_kind_of_failure_is_tried_again_as_often_as_its_policy_says(
    database: Database, kind: FailureKind
) -> None:
    policy = RETRIES[kind]
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        for wait_s in policy.waits_s:
            leases.fail(session, claimed(session), kind, "It failed.")
            job = jobs.get(session, job_id)
            assert (job.state, job.failure, job.parked) == (JobState.QUEUED, kind, False)
            assert (job.not_before is not None) == (wait_s > 0)
            assert (job.reason or "").startswith("It failed. It is tried again")
        leases.fail(session, claimed(session), kind, "It failed.")
        job = jobs.get(session, job_id)
    assert (job.state, job.reason, job.failure) == (JobState.FAILED, "It failed.", kind)
    assert job.parked == policy.parks
    assert [attempt.outcome for attempt in job.attempts] == [kind.value] * len(policy.waits_s) + ["failed"]


def test_a_job_that_waits_is_taken_by_nobody_and_holds_up_no_other(database: Database) -> None:
    with database.write() as session:
        poison = jobs.submit(session, a_spec()).job.id
        lease = leases.claim(session, a_worker(), 30)
        assert lease is not None
        leases.fail(session, lease, FailureKind.OUT_OF_MEMORY, "No memory.")
        other = jobs.submit(session, a_spec()).job.id
        lease = leases.claim(session, a_worker(), 30)
        assert lease is not None
        assert lease.job_id == other
        assert leases.claim(session, a_worker(), 30) is None
        assert claimed(session).job_id == poison


def test_what_failed_for_want_of_memory_is_measured_again_and_what_succeeded_is_not(
    database: Database,
) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = claimed(session)
        outcomes.plan(session, lease, a_plan("baseline", "bf16"))
        outcomes.save_outcome(session, lease, an_outcome(a_result()))
        outcomes.save_outcome(session, lease, a_failure(index=1))
        leases.fail(session, lease, FailureKind.OUT_OF_MEMORY, "No memory.")
        statuses = [variant.status for variant in jobs.get(session, job_id).variants]
        assert claimed(session).done == (0,)
    assert statuses == [VariantStatus.SUCCEEDED, VariantStatus.PENDING]


def test_a_job_whose_cancel_was_asked_for_is_not_tried_again(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = claimed(session)
        jobs.request_cancel(session, job_id)
        leases.fail(session, lease, FailureKind.LOST, "It was lost.")
        assert jobs.get(session, job_id).state is JobState.CANCELLED


def test_a_parked_job_that_is_put_back_has_a_clean_slate(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        for _ in range(3):
            leases.fail(session, claimed(session), FailureKind.LOST, "It was lost.")
        assert [job.id for job in jobs.list_(session, parked=True).jobs] == [job_id]
        job = jobs.retry(session, job_id)
        assert (job.state, job.parked, job.failure, job.reason) == (JobState.QUEUED, False, None, None)
        assert jobs.retry(session, job_id).state is JobState.QUEUED, "again changes nothing"
        leases.fail(session, claimed(session), FailureKind.LOST, "It was lost.")
        assert jobs.get(session, job_id).state is JobState.QUEUED, "it is counted anew"
        assert jobs.list_(session, parked=True).jobs == ()


def test_only_a_parked_job_is_put_back(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        outcomes.finish(session, claimed(session), JobState.SUCCEEDED)
        with pytest.raises(ConflictError, match="succeeded and not parked"):
            jobs.retry(session, job_id)


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
