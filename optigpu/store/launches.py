"""Launches: a job is handed to a cluster's scheduler, whose pilot claims it with a token for that job alone. A launch
is written before the scheduler is asked and ended after it has said that it is over, so a launcher that dies in between
finds it again, by its name. A job has one launch at a time."""

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.views import LaunchState, LaunchView
from optigpu.job.spec import JobSpec
from optigpu.store import leases, transitions
from optigpu.store.database import moment
from optigpu.store.events import locked
from optigpu.store.keys import hash_of
from optigpu.store.leases import Lease
from optigpu.store.queue import is_due, suits
from optigpu.store.statements import insert_into
from optigpu.store.tables import Attempt, Job, LauncherRow, LaunchRow
from optigpu.store.transitions import attempt_of, in_state
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import ConflictError, FailureKind, Frozen, JobState, Scheduler, new_id

TOKEN_PREFIX = "ogp_"
WAITS_AT_MOST = timedelta(days=7)
"""How long a token is valid in a scheduler's queue."""
AFTER_THE_LIMIT = timedelta(hours=1)
"""How long it is valid after a claim, besides the job's time limit."""


class Begun(Frozen):
    """A launch that was just written. Its token is shown this once."""

    id: str
    token: str
    spec: JobSpec
    job_id: str


class Launch(Frozen):
    """A launch that has not ended, and what became of its job; `now` is the database's clock."""

    id: str
    job_id: str
    reference: str | None
    state: LaunchState
    created_at: datetime
    expires_at: datetime
    job_state: JobState
    job_ended_at: datetime | None
    now: datetime


class Pilot(Frozen):
    """Who has a valid token: the pilot of a launch."""

    launch_id: str
    job_id: str


class PilotLease(Frozen):
    """The answer to a claim: the job, and how long it is the pilot's after each sign of life."""

    lease: Lease
    lease_s: float


def begin(session: Session, scheduler: Scheduler) -> Begun | None:
    """Writes a launch for the next job that waits for this scheduler, by priority, then age; None if none does. A job
    whose document this version cannot read ends failed."""
    at = moment(session)
    while (job := _next(session, scheduler, at)) is not None:
        spec = leases.readable(session, job, at)
        if spec is None:
            continue
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        row = {
            "id": new_id(),
            "job_id": job.id,
            "scheduler": scheduler,
            "state": LaunchState.SUBMITTED,
            "fencing": job.fencing,
            "token_hash": hash_of(token),
            "created_at": at,
            "expires_at": at + WAITS_AT_MOST,
        }
        session.execute(insert_into(session, LaunchRow).values(row))
        return Begun(id=row["id"], token=token, spec=spec, job_id=job.id)
    return None


def live(session: Session, scheduler: Scheduler) -> Sequence[Launch]:
    """The launches of this scheduler that have not ended, the oldest first."""
    at = moment(session)
    row = LaunchRow
    query = select(
        *(row.id, row.job_id, row.reference, row.state, row.created_at, row.expires_at),
        *(Job.state.label("job_state"), Job.ended_at.label("job_ended_at")),
    ).join(Job, Job.id == row.job_id)
    query = query.where(row.scheduler == scheduler, row.ended_at.is_(None))
    found = session.execute(query.order_by(row.created_at, row.id)).mappings()
    return [Launch.model_validate({**each, "now": at}) for each in found]


def note(session: Session, launch_id: str, state: LaunchState, reference: str) -> None:
    """What the scheduler says of a launch. One that has ended stays as it is."""
    row = _row(session, launch_id)
    if row.ended_at is None:
        row.state, row.reference = state, reference


def end(session: Session, launch_id: str, reason: str) -> None:
    """The launch is over, and its token with it. If no pilot has claimed the job, this was an attempt at it that
    failed; `transitions.RETRIES` says what follows. Ending a launch again changes nothing."""
    job_id = session.scalars(select(LaunchRow.job_id).where(LaunchRow.id == launch_id)).one()
    job, row = locked(session, job_id), _row(session, launch_id)  # in the order of a claim
    if row.ended_at is not None:
        return
    at = moment(session)
    said = row.reason or reason
    row.state, row.reason, row.ended_at = LaunchState.ENDED, said, at
    session.flush()
    if job.state is JobState.QUEUED and job.fencing == row.fencing:
        _attempt_without_pilot(session, job, row)
        transitions.fail(session, job, FailureKind.NOT_STARTED, said, at)


def verify(session: Session, token: str) -> Pilot | None:
    """The pilot with this token; None if it is unknown, has expired, or its launch or its job has ended."""
    at = moment(session)
    query = select(LaunchRow.id, LaunchRow.job_id).join(Job, Job.id == LaunchRow.job_id)
    valid = LaunchRow.token_hash == hash_of(token), LaunchRow.ended_at.is_(None), LaunchRow.expires_at > at
    unfinished = Job.state.in_((JobState.QUEUED, JobState.RUNNING))
    found = session.execute(query.where(*valid, unfinished)).one_or_none()
    return None if found is None else Pilot(launch_id=found.id, job_id=found.job_id)


def claim(session: Session, pilot: Pilot, worker: WorkerInfo, lease_s: float) -> Lease | str:
    """Gives the pilot its job, for `lease_s` seconds; or says why it cannot have it, as the launch will have ended. The
    same worker that claims again gets the same lease. Raises ConflictError if another worker has the job."""
    at = moment(session)
    job, row = locked(session, pilot.job_id), _row(session, pilot.launch_id)
    if job.state is JobState.RUNNING and job.worker_id == worker.id:
        return leases.resumed(session, job.id, job.fencing)
    if job.state is not JobState.QUEUED or row.ended_at is not None:
        raise ConflictError(f"Job {job.id} is {job.state}, so that this pilot has nothing to do; end it.")
    if session.scalars(select(Job.id).where(Job.id == job.id, *suits(worker))).one_or_none() is None:
        row.reason = (
            f"The allocation's machine ({worker.hardware_class}) does not have what the job asks for; ask the "
            f"scheduler for another one with OPTIGPU_LAUNCH_OPTIONS, or change the job's target."
        )
        return row.reason
    lease = leases.claim_one(session, job.id, worker, lease_s, at)
    if lease is None:
        return f"Job {job.id} cannot be read by this version."
    row.expires_at = at + timedelta(seconds=lease.spec.limits.timeout_s) + AFTER_THE_LIMIT
    return lease


def last_of(session: Session, job_id: str) -> LaunchView | None:
    """The last launch of a job, as it is shown."""
    query = select(LaunchRow).where(LaunchRow.job_id == job_id)
    row = session.scalars(query.order_by(LaunchRow.created_at.desc(), LaunchRow.id.desc()).limit(1)).first()
    return None if row is None else row.as_view(LaunchView)


def _next(session: Session, scheduler: Scheduler, at: datetime) -> Job | None:
    alive = select(LaunchRow.id).where(LaunchRow.job_id == Job.id, LaunchRow.ended_at.is_(None))
    waits = in_state(JobState.QUEUED), Job.via == scheduler, Job.via.is_not(None), *is_due(at)
    query = select(Job).where(*waits, ~alive.correlate(Job).exists())
    query = query.order_by(Job.precedence, Job.created_at, Job.id).limit(1)
    return session.scalars(query.with_for_update(skip_locked=True)).one_or_none()


def _row(session: Session, launch_id: str) -> LaunchRow:
    query = select(LaunchRow).where(LaunchRow.id == launch_id).with_for_update()
    return session.scalars(query, execution_options={"populate_existing": True}).one()


def _attempt_without_pilot(session: Session, job: Job, row: LaunchRow) -> None:
    """Enters it as the attempt before it was, so that what that one has measured is still of the same device."""
    last = attempt_of(session, job.id, job.attempt)
    job.attempt += 1
    session.add(
        Attempt(
            job_id=job.id,
            number=job.attempt,
            worker_id=f"{row.scheduler}:{row.reference or 'unknown'}",
            host_id=last.host_id if last else "",
            device=last.device if last else None,
            version=last.version if last else "",
            started_at=row.created_at,
        )
    )
    session.flush()


ALIVE = timedelta(minutes=2)
"""A scheduler may take a while to answer."""


def seen(session: Session, scheduler: Scheduler, problem: str | None) -> None:
    """The launcher is alive. `problem` is a sentence: why it can hand over nothing now; None if it can."""
    changes = {"seen_at": moment(session), "problem": problem}
    insert = insert_into(session, LauncherRow).values(scheduler=scheduler, **changes)
    session.execute(insert.on_conflict_do_update(index_elements=["scheduler"], set_=changes))


def problem_of(session: Session, scheduler: Scheduler) -> str | None:
    """Why jobs for this scheduler are not handed over now, in a sentence; None if they are."""
    row = session.get(LauncherRow, scheduler, populate_existing=True)
    if row is None or row.seen_at < moment(session) - ALIVE:
        start = f"`python -m worker --launch {scheduler}`"
        return f"No launcher for {scheduler} is alive. Start one beside the scheduler: {start}."
    return row.problem
