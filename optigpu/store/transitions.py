"""The job's state machine: queued -> running -> succeeded | failed | cancelled, and back to queued. Every change of a
state goes through here, on a locked row, and leaves an event."""

from collections.abc import Collection
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, literal, select, update
from sqlalchemy.orm import Session

from optigpu.documents.administration import WebhookEvent
from optigpu.store import webhooks
from optigpu.store.events import record
from optigpu.store.tables import Attempt, Job, VariantRow
from optigpu.vocabulary import Frozen, JobState, VariantStatus

UNFINISHED = (VariantStatus.PENDING, VariantStatus.RUNNING)
UNMEASURED = (*UNFINISHED, VariantStatus.FAILED, VariantStatus.CANCELLED)
"""What another attempt measures if the one before failed of something that lies in none of the variants."""


class Again(Frozen):
    """Why a job waits for another attempt, in a sentence, and for how long."""

    reason: str
    wait_s: float


def in_state(state: JobState) -> ColumnElement[bool]:
    """The condition on a job's state as a literal: with a parameter in its place no partial index can be used."""
    return Job.state == literal(state, Job.__table__.c.state.type, literal_execute=True)


def announce(session: Session, job: Job, at: datetime) -> None:
    """The event that says which state the job is in now."""
    data = {
        "state": job.state.value,
        "reason": job.reason,
        "attempt": job.attempt,
        "worker_id": job.worker_id,
    }
    record(session, job, "state", data, at)


def end(session: Session, job: Job, state: JobState, reason: str | None, at: datetime) -> None:
    """Ends the job, and tells the webhooks; variants that were not measured become cancelled, with the reason."""
    _end_attempt(session, job, state.value, at)
    unmeasured = reason or "The job ended before this variant was measured."
    _set_status(session, job.id, UNFINISHED, VariantStatus.CANCELLED, unmeasured)
    job.state, job.reason, job.ended_at = state, reason, at
    job.lease_until, job.not_before = None, None
    announce(session, job, at)
    finished = {"job_id": job.id, "state": state.value, "reason": reason, "name": job.spec.get("name")}
    webhooks.record(session, WebhookEvent.JOB_FINISHED, finished, at)


def requeue(session: Session, job: Job, outcome: str, at: datetime, again: Again | None = None) -> None:
    """Puts a job back into the queue; `outcome` says how the attempt ended, `again` is None if the worker stops."""
    _end_attempt(session, job, outcome, at)
    job.not_before = at + timedelta(seconds=again.wait_s) if again and again.wait_s else None
    job.reason = again.reason if again else None
    _wait(session, job, UNFINISHED, at)


def revive(session: Session, job: Job, at: datetime) -> None:
    """Puts a job that has ended back into the queue, with a clean slate; what was measured is kept."""
    job.ended_at, job.reason, job.attribution, job.not_before = None, None, None, None
    job.failure, job.parked, job.forgiven = None, False, job.attempt
    _wait(session, job, UNMEASURED, at)


def measure_again(session: Session, job: Job) -> None:
    """The variants that failed in this attempt wait for the next one."""
    _set_status(session, job.id, UNMEASURED, VariantStatus.PENDING, None)


def attempt_of(session: Session, job_id: str, number: int) -> Attempt | None:
    """The job's attempt with that number."""
    return session.scalars(
        select(Attempt).where(Attempt.job_id == job_id, Attempt.number == number)
    ).one_or_none()


def _wait(session: Session, job: Job, unfinished: Collection[VariantStatus], at: datetime) -> None:
    _set_status(session, job.id, unfinished, VariantStatus.PENDING, None)
    job.state, job.worker_id, job.lease_until, job.started_at = JobState.QUEUED, None, None, None
    job.progress = {}
    announce(session, job, at)


def _end_attempt(session: Session, job: Job, outcome: str, at: datetime) -> None:
    attempt = attempt_of(session, job.id, job.attempt)
    if attempt is not None and attempt.ended_at is None:
        attempt.ended_at, attempt.outcome = at, outcome


def _set_status(
    session: Session,
    job_id: str,
    before: Collection[VariantStatus],
    status: VariantStatus,
    reason: str | None,
) -> None:
    these = VariantRow.job_id == job_id, VariantRow.status.in_(before)
    session.execute(update(VariantRow).where(*these).values(status=status, reason=reason))
