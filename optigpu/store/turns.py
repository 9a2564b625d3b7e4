"""Whose turn it is: jobs of the highest priority first; of these, one of the key that had the least of the workers'
time within the last hour; of these, the oldest. The jobs of one key that ask for the same of a worker are a lane,
ordered by priority and age. A claim looks at the first job of each lane, so its cost grows with the number of lanes
that wait."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import CTE, ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from optigpu.store.matching import can_run
from optigpu.store.statements import seconds_between
from optigpu.store.tables import Attempt, Job
from optigpu.store.transitions import in_state
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import DeviceKind, Frozen, JobState

RECENT = timedelta(hours=1)
JUST_BEGUN_S = 60.0
"""What a running job counts as at least: otherwise one key would get every worker that becomes free at once."""


class Head(Frozen):
    """The first job of a lane that the worker can run."""

    owner: str
    job_id: str
    precedence: int
    created_at: datetime


def next_job(session: Session, worker: WorkerInfo, at: datetime, asked: str | None = None) -> str | None:
    """The job whose turn it is of those that the worker can run, or None. `asked` is the job that a message names. It
    is taken before others of the same key and priority."""
    heads = _heads(session, worker, at)
    if not heads:
        return None
    used: Mapping[str, float] = {}
    if len({head.owner for head in heads}) > 1:
        used = used_s(session, worker.device, at)
    first = min(heads, key=lambda head: (used.get(head.owner, 0.0), head.created_at, head.job_id))
    if asked is not None and asked != first.job_id and _is_alike(session, asked, first, worker, at):
        return asked
    return first.job_id


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


def _heads(session: Session, worker: WorkerInfo, at: datetime) -> Sequence[Head]:
    """The first job of each lane that the worker can run, of the highest priority that there is among them."""
    lanes = _lanes(worker.device)
    first = (
        select(Job.id)
        .where(in_state(JobState.QUEUED), Job.device == worker.device, Job.lane == lanes.c.lane, *is_due(at))
        .order_by(Job.precedence, Job.created_at, Job.id)
        .limit(1)
        .correlate(lanes)
        .scalar_subquery()
    )
    alone = select(Job.id).where(
        in_state(JobState.QUEUED), Job.device == worker.device, Job.lane.is_(None), *is_due(at)
    )
    heads = select(first).select_from(lanes).union_all(alone)
    query = select(Job.owner, Job.id, Job.precedence, Job.created_at).where(
        Job.id.in_(heads), *can_run(worker)
    )
    found = [
        Head(owner=row.owner, job_id=row.id, precedence=row.precedence, created_at=row.created_at)
        for row in session.execute(query)
    ]
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


def _is_alike(session: Session, asked: str, first: Head, worker: WorkerInfo, at: datetime) -> bool:
    """Whether the job of a message is of the key and the priority whose turn it is, and the worker can run it."""
    same = Job.id == asked, Job.owner == first.owner, Job.precedence == first.precedence
    query = select(Job.id).where(*same, in_state(JobState.QUEUED), *is_due(at), *can_run(worker))
    return session.scalars(query).one_or_none() is not None
