"""Leases on jobs: claim, heartbeat, release, failure, and the sweep that takes back the jobs of lost workers. A claim
raises the job's fencing number. What a worker writes is accepted only while the job runs under the number with which it
was claimed."""

from datetime import datetime, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from optigpu.documents.views import ProgressView
from optigpu.job.estimate import missed
from optigpu.job.spec import JobSpec
from optigpu.store import transitions
from optigpu.store.database import moment
from optigpu.store.events import replace
from optigpu.store.queue import next_job
from optigpu.store.tables import Attempt, Job, VariantRow
from optigpu.store.transitions import UNFINISHED, announce, attempt_of, end, in_state, requeue
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import FailureKind, Frozen, JobState, LeaseLostError, SpecError


class Hold(Frozen):
    """What a write for a running job must show."""

    job_id: str
    fencing: int


class Lease(Hold):
    """A worker's hold on a job. `done` are the indexes of the variants that an earlier attempt has measured."""

    spec: JobSpec
    attempt: int
    worker_id: str
    done: tuple[int, ...] = ()


class Swept(Frozen):
    """The jobs whose lease had run out, by what became of them, and those whose deadline had passed before they
    began."""

    requeued: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    overdue: tuple[str, ...] = ()


def claim(
    session: Session,
    worker: WorkerInfo,
    lease_s: float,
    now: datetime | None = None,
    asked: str | None = None,
) -> Lease | None:
    """Gives the worker the job whose turn it is (`store.queue`), for `lease_s` seconds; None when there is none.
    `asked` is the job that a message names. A job whose document this version cannot read ends failed."""
    at = moment(session, now)
    while (job_id := next_job(session, worker, at, asked)) is not None:
        lease = claim_one(session, job_id, worker, lease_s, at)
        if lease is not None:  # otherwise another worker has just taken it, or it cannot be read
            return lease
    return None


def claim_one(
    session: Session, job_id: str, worker: WorkerInfo, lease_s: float, at: datetime
) -> Lease | None:
    """Gives the worker this job; None if it is not queued, or if this version cannot read it, so that it has failed."""
    # One conditional statement, so that no two workers take the same job; None for the one that came later.
    take = (
        update(Job)
        .where(Job.id == job_id, in_state(JobState.QUEUED))
        .values(
            state=JobState.RUNNING,
            worker_id=worker.id,
            lease_until=at + timedelta(seconds=lease_s),
            started_at=at,
            not_before=None,
            reason=None,
            fencing=Job.fencing + 1,
            attempt=Job.attempt + 1,
            progress={},
        )
        .returning(Job)
    )
    options = {"populate_existing": True, "synchronize_session": False}
    job = session.scalars(take, execution_options=options).one_or_none()
    if job is None:
        return None
    done = _begin_attempt(session, job, worker, at)
    announce(session, job, at)
    spec = readable(session, job, at)
    if spec is None:
        return None
    return Lease(
        job_id=job.id, spec=spec, fencing=job.fencing, attempt=job.attempt, worker_id=worker.id, done=done
    )


def resumed(session: Session, job_id: str, fencing: int) -> Lease:
    """The lease under which a job runs, for a worker that calls without a database. Raises LeaseLostError."""
    query = select(Job).where(Job.id == job_id, Job.fencing == fencing, Job.state == JobState.RUNNING)
    job = session.scalars(query).one_or_none()
    if job is None or job.worker_id is None:
        raise _lost(job_id)
    spec = JobSpec.model_validate(job.spec)
    return Lease(job_id=job.id, spec=spec, fencing=fencing, attempt=job.attempt, worker_id=job.worker_id)


def readable(session: Session, job: Job, at: datetime) -> JobSpec | None:
    """What the job asks for; None if this version cannot read its document, and the job has failed of it."""
    try:
        return JobSpec.model_validate(job.spec)
    except SpecError as error:
        first = str(error).splitlines()[0].rstrip(".")
        why = f"This version can no longer run the job ({first}); post it again in the current format."
        transitions.fail(session, job, FailureKind.REFUSED, why, at)
        return None


def heartbeat(
    session: Session,
    lease: Hold,
    lease_s: float,
    progress: ProgressView | None = None,
    now: datetime | None = None,
) -> bool:
    """Extends the lease and stores the progress, which replaces the event `progressed`; returns True if a cancel was
    requested. Raises LeaseLostError."""
    job = held(session, lease)
    at = moment(session, now)
    job.lease_until = at + timedelta(seconds=lease_s)
    news = progress.model_dump(mode="json") if progress else job.progress
    if news != job.progress:
        job.progress = news
        replace(session, job, "progressed", news, at)
    return job.cancel_requested_at is not None


def held(session: Session, lease: Hold) -> Job:
    """The job, locked. Raises LeaseLostError if it no longer runs under this lease."""
    runs = Job.id == lease.job_id, Job.fencing == lease.fencing, Job.state == JobState.RUNNING
    query = select(Job).where(*runs).with_for_update()
    job = session.scalars(query, execution_options={"populate_existing": True}).one_or_none()
    if job is None:
        raise _lost(lease.job_id)
    return job


def release(session: Session, lease: Hold) -> None:
    """Hands the job back because the worker stops; the attempt does not count as lost. Raises LeaseLostError."""
    job = held(session, lease)
    at = moment(session)
    if job.cancel_requested_at is not None:
        end(session, job, JobState.CANCELLED, "Cancelled on request.", at)
    else:
        requeue(session, job, "released", at)


def fail(session: Session, lease: Hold, kind: FailureKind, error: str) -> None:
    """This attempt failed; `RETRIES` says what follows. Raises LeaseLostError."""
    job = held(session, lease)
    at = moment(session)
    if job.cancel_requested_at is not None:
        end(session, job, JobState.CANCELLED, "Cancelled on request.", at)
    else:
        transitions.fail(session, job, kind, error, at)


def sweep(session: Session, now: datetime | None = None) -> Swept:
    """Takes back jobs whose lease has run out, and ends those whose deadline has passed before they began."""
    at = moment(session, now)
    query = select(Job).where(in_state(JobState.RUNNING), Job.lease_until < at)
    query = query.order_by(Job.created_at, Job.id)
    swept: dict[JobState, list[str]] = {JobState.QUEUED: [], JobState.FAILED: [], JobState.CANCELLED: []}
    for job in session.scalars(query.with_for_update(skip_locked=True)).all():
        _take_back(session, job, at)
        swept[job.state].append(job.id)
    late = select(Job).where(in_state(JobState.QUEUED), Job.deadline <= at).order_by(Job.created_at, Job.id)
    overdue = session.scalars(late.with_for_update(skip_locked=True)).all()
    for job in overdue:
        assert job.deadline is not None
        end(session, job, JobState.FAILED, missed(job.deadline), at)
    return Swept(
        requeued=tuple(swept[JobState.QUEUED]),
        failed=tuple(swept[JobState.FAILED]),
        cancelled=tuple(swept[JobState.CANCELLED]),
        overdue=tuple(job.id for job in overdue),
    )


def _begin_attempt(session: Session, job: Job, worker: WorkerInfo, at: datetime) -> tuple[int, ...]:
    """Enters the attempt; returns what it need not measure again: what the same version measured on the same device of
    the same host, but not in another allocation of a scheduler."""
    last = attempt_of(session, job.id, job.attempt - 1)
    session.add(
        Attempt(
            job_id=job.id,
            number=job.attempt,
            worker_id=worker.id,
            host_id=worker.host_id,
            device=worker.measures_on,
            version=worker.version,
            started_at=at,
        )
    )
    if last is None:
        return ()
    here = worker.host_id, worker.measures_on, worker.version
    if job.via is not None or (last.host_id, last.device, last.version) != here:
        session.execute(delete(VariantRow).where(VariantRow.job_id == job.id))
        return ()
    finished = VariantRow.job_id == job.id, VariantRow.status.not_in(UNFINISHED)
    return tuple(session.scalars(select(VariantRow.index).where(*finished).order_by(VariantRow.index)))


def _take_back(session: Session, job: Job, at: datetime) -> None:
    if job.cancel_requested_at is not None:
        end(session, job, JobState.CANCELLED, "Cancelled on request; its worker had stopped answering.", at)
        return
    lost = transitions.times(session, job, FailureKind.LOST) + 1
    times = "once" if lost == 1 else f"{lost} times"
    reason = f"Its worker was lost {times}: it died, hung or lost its connection. Read the worker's log."
    transitions.fail(session, job, FailureKind.LOST, reason, at)


def _lost(job_id: str) -> LeaseLostError:
    return LeaseLostError(f"Job {job_id} has ended or belongs to another worker; stop working on it.")
