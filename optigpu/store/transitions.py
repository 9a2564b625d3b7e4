"""The job's state machine: queued -> running -> succeeded | failed | cancelled, and back to queued. Every change of a
state goes through here, on a locked row, and leaves an event."""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType

from sqlalchemy import ColumnElement, func, literal, select, update
from sqlalchemy.orm import Session

from optigpu.documents.administration import WebhookEvent
from optigpu.store import webhooks
from optigpu.store.events import record
from optigpu.store.tables import Attempt, Job, VariantRow
from optigpu.vocabulary import FailureKind, Frozen, JobState, VariantStatus

UNFINISHED = (VariantStatus.PENDING, VariantStatus.RUNNING)
UNMEASURED = (*UNFINISHED, VariantStatus.FAILED, VariantStatus.CANCELLED)
"""What another attempt measures if the one before failed of something that lies in none of the variants."""


class Retry(Frozen):
    """How often a job is tried again after a kind of failure: once for each wait, in seconds. `parks` says whether the
    job is parked after the last attempt: failed, until a person puts it back; `remeasures` whether variants that failed
    in the attempt are measured again."""

    waits_s: tuple[float, ...] = ()
    parks: bool = True
    remeasures: bool = False


RETRIES: Mapping[FailureKind, Retry] = MappingProxyType(
    {
        # A job that kills its worker is taken by three of them and no more.
        FailureKind.LOST: Retry(waits_s=(0, 30)),
        # Neither of these two says anything of the job, so that they are patient.
        FailureKind.DATABASE_AWAY: Retry(waits_s=(0, 10, 60, 300, 900)),
        FailureKind.DEVICE_LOST: Retry(waits_s=(0, 10, 60, 300, 900), remeasures=True),
        # The memory may have been another program's.
        FailureKind.OUT_OF_MEMORY: Retry(waits_s=(60,), remeasures=True),
        # An allocation that ended before its pilot claimed the job: its machine may have been at fault.
        FailureKind.NOT_STARTED: Retry(waits_s=(0, 30)),
        # One that ended before a replicate was whole: the scheduler had others who came first.
        FailureKind.ALLOCATION_ENDED: Retry(waits_s=(0, 60, 300), remeasures=True),
        # A fault of our own comes again.
        FailureKind.BROKEN: Retry(),
        # So does a refusal, and it is what the job asks for.
        FailureKind.REFUSED: Retry(parks=False),
    }
)


def in_state(state: JobState) -> ColumnElement[bool]:
    """The condition on a job's state as a literal: with a parameter in its place no partial index can be used."""
    return Job.state == literal(state, Job.__table__.c.state.type, literal_execute=True)


def announce(session: Session, job: Job, at: datetime) -> None:
    """The event that says which state the job is in now."""
    data = {"reason": job.reason, "attempt": job.attempt, "worker_id": job.worker_id}
    record(session, job, "state", {"state": job.state.value} | data, at)


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


def requeue(
    session: Session, job: Job, outcome: str, at: datetime, reason: str | None = None, wait_s: float = 0
) -> None:
    """Puts a job back into the queue; `outcome` says how the attempt ended, `reason` is None if the worker stops."""
    _end_attempt(session, job, outcome, at)
    job.not_before = at + timedelta(seconds=wait_s) if wait_s else None
    job.reason = reason
    _wait(session, job, UNFINISHED, at)


def fail(session: Session, job: Job, kind: FailureKind, error: str, at: datetime) -> None:
    """Ends an attempt that failed: the locked job waits for its next one, or ends failed with the error."""
    policy = RETRIES[kind]
    before = times(session, job, kind)
    job.failure = kind
    if before >= len(policy.waits_s):
        job.parked = policy.parks
        end(session, job, JobState.FAILED, error, at)
        return
    if policy.remeasures:
        _set_status(session, job.id, UNMEASURED, VariantStatus.PENDING, None)
    wait_s = policy.waits_s[before]
    after = f" after {wait_s:g} s" if wait_s else ""
    left = len(policy.waits_s) - before
    reason = f"{error} It is tried again{after}, at most {left} {'time' if left == 1 else 'times'} more."
    requeue(session, job, kind.value, at, reason, wait_s)


def times(session: Session, job: Job, kind: FailureKind) -> int:
    """How often an attempt failed of it since the job was posted, or put back by a person."""
    failed = Attempt.job_id == job.id, Attempt.number > job.forgiven, Attempt.outcome == kind.value
    return session.execute(select(func.count()).select_from(Attempt).where(*failed)).scalar_one()


def revive(session: Session, job: Job, at: datetime) -> None:
    """Puts a job that has ended back into the queue, with a clean slate; what was measured is kept."""
    job.ended_at, job.reason, job.attribution, job.not_before = None, None, None, None
    job.failure, job.parked, job.forgiven = None, False, job.attempt
    _wait(session, job, UNMEASURED, at)


def attempt_of(session: Session, job_id: str, number: int) -> Attempt | None:
    """The job's attempt with that number."""
    query = select(Attempt).where(Attempt.job_id == job_id, Attempt.number == number)
    return session.scalars(query).one_or_none()


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
