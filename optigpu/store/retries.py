"""What follows when an attempt at a job fails, by what it failed of: another attempt, after a wait, or the end. A job
that fails of what it does not ask for is parked at the end: failed, until a person puts it back."""

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from optigpu.store import transitions
from optigpu.store.tables import Attempt, Job
from optigpu.store.transitions import Again
from optigpu.vocabulary import FailureKind, Frozen, JobState


class Retry(Frozen):
    """How often a job is tried again after a kind of failure: once for each wait, in seconds. `parks` says whether the
    job is parked after the last attempt, `remeasures` whether variants that failed in the attempt are measured
    again."""

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


def fail(session: Session, job: Job, kind: FailureKind, error: str, at: datetime) -> None:
    """Ends an attempt that failed: the locked job waits for its next one, or ends failed with the error."""
    policy = RETRIES[kind]
    before = times(session, job, kind)
    job.failure = kind
    if before >= len(policy.waits_s):
        job.parked = policy.parks
        transitions.end(session, job, JobState.FAILED, error, at)
        return
    if policy.remeasures:
        transitions.measure_again(session, job)
    wait_s = policy.waits_s[before]
    after = f" after {wait_s:g} s" if wait_s else ""
    left = len(policy.waits_s) - before
    reason = f"{error} It is tried again{after}, at most {left} {'time' if left == 1 else 'times'} more."
    transitions.requeue(session, job, kind.value, at, Again(reason=reason, wait_s=wait_s))


def times(session: Session, job: Job, kind: FailureKind) -> int:
    """How often an attempt failed of it since the job was posted, or put back by a person."""
    failed = Attempt.job_id == job.id, Attempt.number > job.forgiven, Attempt.outcome == kind.value
    return session.execute(select(func.count()).select_from(Attempt).where(*failed)).scalar_one()
