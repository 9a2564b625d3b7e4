"""The queue: jobs by state, a job's position, when it will begin, and whose turn it is: jobs of the highest priority
first; of these, one of the key that had the least of the workers' time within the last hour; of these, the oldest. The
jobs of one key that ask for the same of a worker are a lane, ordered by priority and age. A claim looks at the first
job of each lane, so its cost grows with the number of lanes that wait. Jobs for a scheduler are counted by state
alone."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from statistics import median

from sqlalchemy import CTE, ColumnElement, Row, and_, func, literal, not_, or_, select, tuple_
from sqlalchemy.orm import Session

from optigpu.documents.views import Want, WorkerFacts
from optigpu.job.plan import HUB
from optigpu.store import workers
from optigpu.store.database import moment
from optigpu.store.events import locked, record
from optigpu.store.statements import seconds_between
from optigpu.store.tables import Attempt, Job, JobEvent, JobNeed
from optigpu.store.transitions import in_state
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import DeviceKind, JobState

RECENT = timedelta(hours=1)
JUST_BEGUN_S = 60.0
"""What a running job counts as at least: otherwise one key would get every worker that becomes free at once."""


def suits(worker: WorkerFacts) -> tuple[ColumnElement[bool], ...]:
    """Conditions on a job's row that hold if the worker's machine has what the job asks for."""
    lacking = select(JobNeed.name).where(JobNeed.job_id == Job.id, not_(has(worker)))
    return (*device_fits(worker).values(), not_(lacking.correlate(Job).exists()))


def device_fits(worker: WorkerFacts) -> dict[Want, ColumnElement[bool]]:
    """Conditions on a job's row, each of which holds if the worker's device is in one respect as the job asks for."""
    names = [literal(name.lower()).like(Job.gpu_pattern, escape="\\") for name in worker.gpus]
    return {
        Want.DEVICE: Job.device == worker.device,
        Want.GPU: or_(Job.gpu_pattern.is_(None), *names),
        Want.MEMORY: Job.min_vram_bytes <= (worker.vram_bytes or 0),
    }


def has(worker: WorkerFacts) -> ColumnElement[bool]:
    """The condition on a row of a job's needs that holds if the worker has it."""
    offered = {Want.BACKEND: worker.backends, Want.PACKAGE: worker.packages, Want.MODEL: worker.models}
    held = [and_(JobNeed.kind == kind, JobNeed.name.in_(names)) for kind, names in offered.items()]
    if worker.downloads:
        held.append(and_(JobNeed.kind == Want.MODEL, JobNeed.name.like(f"{HUB}%")))
    return or_(*held)


def next_job(session: Session, worker: WorkerInfo, at: datetime, asked: str | None = None) -> str | None:
    """The job whose turn it is of those that the worker can run, or None. `asked` is the job that a message names. It
    is taken before others of the same key and priority."""
    heads = _heads(session, worker, at)
    if not heads:
        return None
    used = used_s(session, worker.device, at) if len({head.owner for head in heads}) > 1 else {}
    first = min(heads, key=lambda head: (used.get(head.owner, 0.0), head.created_at, head.id))
    turn: str = first.id
    if asked is not None and asked != turn:
        same = Job.id == asked, Job.owner == first.owner, Job.precedence == first.precedence
        can_begin = in_state(JobState.QUEUED), *is_due(at), Job.via.is_(None), *suits(worker)
        if session.scalars(select(Job.id).where(*same, *can_begin)).one_or_none() is not None:
            return asked
    return turn


def used_s(session: Session, device: DeviceKind, at: datetime) -> Mapping[str, float]:
    """By key, how long workers of that kind of device were busy with its jobs within the last hour."""
    length = func.sum(seconds_between(session, Attempt.started_at, Attempt.ended_at))
    ended = (
        select(Job.owner, length)
        .join(Attempt, Attempt.job_id == Job.id)
        .where(Attempt.ended_at > at - RECENT, Job.device == device)
        .group_by(Job.owner)
    )
    used = {owner: float(seconds) for owner, seconds in session.execute(ended)}
    running = select(Job.owner, Job.started_at).where(in_state(JobState.RUNNING), Job.device == device)
    for owner, started_at in session.execute(running):
        so_far = (at - started_at).total_seconds() if started_at else 0.0
        used[owner] = used.get(owner, 0.0) + max(so_far, JUST_BEGUN_S)
    return used


def is_due(at: datetime) -> tuple[ColumnElement[bool], ...]:
    """Conditions on a queued job that hold if it may begin now."""
    return (
        or_(Job.not_before.is_(None), Job.not_before <= at),
        or_(Job.deadline.is_(None), Job.deadline > at),
    )


def _heads(session: Session, worker: WorkerInfo, at: datetime) -> Sequence[Row[str, str, int, datetime]]:
    """The first job of each lane that the worker can run, of the highest priority that there is among them."""
    lanes = _lanes(worker.device)
    queued = in_state(JobState.QUEUED), Job.device == worker.device, *is_due(at)
    first = (
        select(Job.id)
        .where(*queued, Job.lane == lanes.c.lane)
        .order_by(Job.precedence, Job.created_at, Job.id)
        .limit(1)
        .correlate(lanes)
        .scalar_subquery()
    )
    heads = select(first).select_from(lanes).union_all(select(Job.id).where(*queued, Job.lane.is_(None)))
    query = select(Job.owner, Job.id, Job.precedence, Job.created_at)
    found = session.execute(query.where(Job.id.in_(heads), Job.via.is_(None), *suits(worker))).all()
    highest = min((head.precedence for head in found), default=0)
    return [head for head in found if head.precedence == highest]


def _lanes(device: DeviceKind) -> CTE:
    """The lanes that have jobs in the queue. Each step finds the next one in the index, and reads no other job."""
    waiting = and_(in_state(JobState.QUEUED), Job.device == device)
    lanes = select(func.min(Job.lane).label("lane")).where(waiting).cte("lanes", recursive=True)
    following = (
        select(func.min(Job.lane)).where(waiting, Job.lane > lanes.c.lane).correlate(lanes).scalar_subquery()
    )
    return lanes.union_all(select(following).select_from(lanes).where(lanes.c.lane.is_not(None)))


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
    """The place of a queued job among those of its kind of device, from 1. Keys take turns, so it is
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
    # The median length of the latest jobs with the same workload and plan on this kind of device.
    like = Job.device == job.device, Job.workload == job.workload, Job.plan == job.plan
    query = (
        select(Job.started_at, Job.ended_at)
        .where(in_state(JobState.SUCCEEDED), *like, Job.started_at.is_not(None))
        .order_by(Job.ended_at.desc())
        .limit(LATEST)
    )
    spans = session.execute(query).all()
    lengths = [(ended - started).total_seconds() for started, ended in spans if started and ended]
    usual_s = median(lengths) if lengths else None
    serving = [worker for worker in workers.alive(session, lease_s) if worker.device is job.device]
    if usual_s is None or not serving:
        return None
    idle = sum(worker.job_id is None for worker in serving)
    to_end = position - idle
    wait_s = (to_end - 0.5) * usual_s / len(serving) if to_end > 0 else 0.0
    begins = at + timedelta(seconds=wait_s)
    return begins if job.not_before is None else max(begins, job.not_before)


def _count(session: Session, *conditions: ColumnElement[bool]) -> int:
    query = select(func.count()).select_from(Job).where(*_WAITS, *conditions)
    return session.execute(query).scalar_one()


TRACED = "traced"
"""The kind of the event; its data is `{"traceparent": ...}`, as W3C Trace Context writes it."""


def keep(session: Session, job_id: str, traceparent: str) -> None:
    """The span with that address has posted the job. Raises NotFoundError."""
    record(session, locked(session, job_id), TRACED, {"traceparent": traceparent}, moment(session))


def parent_of(session: Session, job_id: str) -> str | None:
    """The address of the span that posted the job; None where traces were not recorded."""
    query = select(JobEvent.data).where(JobEvent.job_id == job_id, JobEvent.kind == TRACED)
    data = session.scalars(query.order_by(JobEvent.sequence).limit(1)).one_or_none()
    return None if data is None else str(data["traceparent"])
