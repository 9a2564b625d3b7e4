"""The queue: jobs by state, the number of waiting jobs, and a job's position."""

from sqlalchemy import ColumnElement, func, literal, select, tuple_
from sqlalchemy.orm import Session

from optigpu.store.tables import Job
from optigpu.vocabulary import DeviceKind, JobState


def counts(session: Session) -> dict[JobState, int]:
    """How many jobs are in each state."""
    found = dict.fromkeys(JobState, 0)
    for state, count in session.execute(select(Job.state, func.count()).group_by(Job.state)):
        found[state] = count
    return found


def waiting(session: Session, device: DeviceKind | None = None) -> int:
    """How many jobs are queued, for one kind of device or for any."""
    return _count(session, *([] if device is None else [Job.device == device]))


def position(session: Session, job: Job) -> int | None:
    """1 for the next job of its kind of device; None for a job that is not queued."""
    if job.state is not JobState.QUEUED:
        return None
    here = tuple_(literal(job.created_at, Job.created_at.type), literal(job.id))
    return _count(session, Job.device == job.device, tuple_(Job.created_at, Job.id) < here) + 1


def _count(session: Session, *conditions: ColumnElement[bool]) -> int:
    query = select(func.count()).select_from(Job).where(Job.state == JobState.QUEUED, *conditions)
    return session.execute(query).scalar_one()
