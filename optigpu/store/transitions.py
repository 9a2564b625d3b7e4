"""The job's state machine: queued -> running -> succeeded | failed | cancelled, and back to queued.

Every change of a state goes through here, on a locked row, and leaves an event.
"""

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from optigpu.store.events import record
from optigpu.store.tables import Attempt, Job, VariantRow
from optigpu.vocabulary import JobState, VariantStatus

UNFINISHED = (VariantStatus.PENDING, VariantStatus.RUNNING)


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
    """Ends the job; variants that were not measured become cancelled, with the reason."""
    _end_attempt(session, job, state.value, at)
    unmeasured = reason or "The job ended before this variant was measured."
    _set_unfinished(session, job.id, VariantStatus.CANCELLED, unmeasured)
    job.state, job.reason, job.ended_at, job.lease_until = state, reason, at, None
    announce(session, job, at)


def requeue(session: Session, job: Job, outcome: str, at: datetime) -> None:
    """Puts a job back into its place in the queue; `outcome` says how the attempt ended."""
    _end_attempt(session, job, outcome, at)
    _set_unfinished(session, job.id, VariantStatus.PENDING, None)
    job.state, job.worker_id, job.lease_until, job.started_at = JobState.QUEUED, None, None, None
    job.progress = {}
    announce(session, job, at)


def attempt_of(session: Session, job_id: str, number: int) -> Attempt | None:
    """The job's attempt with that number."""
    return session.scalars(
        select(Attempt).where(Attempt.job_id == job_id, Attempt.number == number)
    ).one_or_none()


def _end_attempt(session: Session, job: Job, outcome: str, at: datetime) -> None:
    attempt = attempt_of(session, job.id, job.attempt)
    if attempt is not None and attempt.ended_at is None:
        attempt.ended_at, attempt.outcome = at, outcome


def _set_unfinished(session: Session, job_id: str, status: VariantStatus, reason: str | None) -> None:
    unfinished = VariantRow.job_id == job_id, VariantRow.status.in_(UNFINISHED)
    session.execute(update(VariantRow).where(*unfinished).values(status=status, reason=reason))
