"""The queue: jobs by state, a job's position, and when it will begin. Jobs for a scheduler are only in the first."""

from datetime import datetime, timedelta
from statistics import median

from sqlalchemy import ColumnElement, func, literal, or_, select, tuple_
from sqlalchemy.orm import Session

from optigpu.store import workers
from optigpu.store.events import append
from optigpu.store.tables import Job, JobEvent
from optigpu.store.transitions import in_state
from optigpu.store.turns import JUST_BEGUN_S, used_s
from optigpu.vocabulary import DeviceKind, JobState

LATEST = 20
"""How many of the latest jobs of a kind tell how long the next one takes."""
_WAITS = in_state(JobState.QUEUED), Job.via.is_(None)
"""Conditions on a job that hold if it waits for a worker of the service."""


def counts(session: Session) -> dict[JobState, int]:
    """How many jobs are in each state."""
    found = dict.fromkeys(JobState, 0)
    for state, count in session.execute(select(Job.state, func.count()).group_by(Job.state)):
        found[state] = count
    return found


def due(session: Session, device: DeviceKind, at: datetime, limit: int) -> list[str]:
    """At most `limit` queued jobs that may begin now, the oldest of the highest priority first."""
    begun = or_(Job.not_before.is_(None), Job.not_before <= at)
    query = select(Job.id).where(*_WAITS, Job.device == device, begun)
    return list(session.scalars(query.order_by(Job.precedence, Job.created_at, Job.id).limit(limit)))


def position(session: Session, job: Job, at: datetime) -> int:
    """The place of a queued job among those of its kind of device, from 1. Keys take turns (`store.turns`), so it is
    reckoned as if each job that begins counted a minute against its key."""
    here = tuple_(literal(job.created_at, Job.created_at.type), literal(job.id))
    of_device = Job.device == job.device
    more_urgent = _count(session, of_device, Job.precedence < job.precedence)
    alike = of_device, Job.precedence == job.precedence
    own = _count(session, *alike, Job.owner == job.owner, tuple_(Job.created_at, Job.id) < here)
    others = select(Job.owner, func.count()).where(*_WAITS, *alike, Job.owner != job.owner)
    lanes = session.execute(others.group_by(Job.owner)).all()
    used = used_s(session, job.device, at) if lanes else {}
    mine = used.get(job.owner, 0.0) + own * JUST_BEGUN_S
    before = 0
    for owner, count in lanes:
        # How many jobs the other key begins before its use has caught up; then both may be even.
        turns, rest = divmod(mine - used.get(owner, 0.0), JUST_BEGUN_S)
        ahead = max(int(turns) + (rest > 0), 0)
        if rest == 0 and turns >= 0 and ahead < count:
            its = select(Job.created_at, Job.id).where(*_WAITS, *alike, Job.owner == owner)
            its = its.order_by(Job.created_at, Job.id).offset(ahead).limit(1)
            other = session.execute(its).one_or_none()
            ahead += other is not None and tuple(other) < (job.created_at, job.id)
        before += min(count, ahead)
    return more_urgent + own + before + 1


def estimated_start(
    session: Session, job: Job, position: int, lease_s: float, at: datetime
) -> datetime | None:
    """When a queued job will begin, if the jobs before it take as long as the latest ones like it did, and half of each
    running job is over. None without such jobs, and without a live worker of its kind of device."""
    usual_s = _usual_s(session, job)
    serving = [worker for worker in workers.alive(session, lease_s) if worker.device is job.device]
    if usual_s is None or not serving:
        return None
    idle = sum(worker.job_id is None for worker in serving)
    to_end = position - idle
    wait_s = (to_end - 0.5) * usual_s / len(serving) if to_end > 0 else 0.0
    begins = at + timedelta(seconds=wait_s)
    return begins if job.not_before is None else max(begins, job.not_before)


def _usual_s(session: Session, job: Job) -> float | None:
    """The median length of the latest jobs with the same workload and plan on this kind of device."""
    like = Job.device == job.device, Job.workload == job.workload, Job.plan == job.plan
    query = (
        select(Job.started_at, Job.ended_at)
        .where(in_state(JobState.SUCCEEDED), *like, Job.started_at.is_not(None))
        .order_by(Job.ended_at.desc())
        .limit(LATEST)
    )
    spans = session.execute(query).all()
    lengths = [(ended - started).total_seconds() for started, ended in spans if started and ended]
    return median(lengths) if lengths else None


def _count(session: Session, *conditions: ColumnElement[bool]) -> int:
    query = select(func.count()).select_from(Job).where(*_WAITS, *conditions)
    return session.execute(query).scalar_one()


TRACED = "traced"
"""The kind of the event; its data is `{"traceparent": ...}`, as W3C Trace Context writes it."""


def keep(session: Session, job_id: str, traceparent: str) -> None:
    """The span with that address has posted the job. Raises NotFoundError."""
    append(session, job_id, TRACED, {"traceparent": traceparent})


def parent_of(session: Session, job_id: str) -> str | None:
    """The address of the span that posted the job; None where traces were not recorded."""
    query = select(JobEvent.data).where(JobEvent.job_id == job_id, JobEvent.kind == TRACED)
    data = session.scalars(query.order_by(JobEvent.sequence).limit(1)).one_or_none()
    return None if data is None else str(data["traceparent"])
