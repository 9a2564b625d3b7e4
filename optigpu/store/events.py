"""A job's events, numbered from 1 in the order in which they happened.

They are kept, except for progress: newer progress replaces older, so that a job's events stay few however long it runs.
Besides the engine's own kinds (`optigpu.documents.events`) there are `state` (the job changed its state: state,
reason, attempt, worker_id), `cancel_requested`, and `traced` (optigpu.store.traces).
"""

from datetime import datetime
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from optigpu.documents.views import EventView, Withdrawn
from optigpu.store.database import moment
from optigpu.store.tables import Job, JobEvent
from optigpu.store.tombstones import absent
from optigpu.vocabulary import Frozen


def append(session: Session, job_id: str, kind: str, data: dict[str, Any]) -> int:
    """Adds an event and returns its sequence number. Raises NotFoundError when there is no such job."""
    return record(session, locked(session, job_id), kind, data, moment(session))


class Head(Frozen):
    """The newest event's sequence, and whether the job has ended, so that no other event will follow."""

    sequence: int
    ended: bool


def head(session: Session, job_id: str) -> Head:
    """The current end of a job's events. Raises NotFoundError."""
    found = session.execute(select(Job.last_sequence, Job.state).where(Job.id == job_id)).one_or_none()
    if found is None:
        raise absent(session, Withdrawn.JOB, job_id)
    return Head(sequence=found.last_sequence, ended=found.state.is_final)


def after(session: Session, job_id: str, sequence: int, limit: int = 500) -> list[EventView]:
    """At most `limit` events of a job that follow the one with that number, in their order."""
    query = (
        select(JobEvent)
        .where(JobEvent.job_id == job_id, JobEvent.sequence > sequence)
        .order_by(JobEvent.sequence)
        .limit(limit)
    )
    return [
        EventView(sequence=event.sequence, at=event.at, kind=event.kind, data=event.data)
        for event in session.scalars(query)
    ]


def locked(session: Session, job_id: str) -> Job:
    """The job as it is now, its row locked until the transaction ends (SQLite: the whole database is)."""
    query = select(Job).where(Job.id == job_id).with_for_update()
    job = session.scalars(query, execution_options={"populate_existing": True}).one_or_none()
    if job is None:
        raise absent(session, Withdrawn.JOB, job_id)
    return job


def record(session: Session, job: Job, kind: str, data: dict[str, Any], at: datetime) -> int:
    """Adds an event to a job whose row is locked."""
    job.last_sequence += 1
    session.add(JobEvent(job_id=job.id, sequence=job.last_sequence, at=at, kind=kind, data=data))
    return job.last_sequence


def replace(session: Session, job: Job, kind: str, data: dict[str, Any], at: datetime) -> int:
    """Like `record`, but removes the job's earlier event of that kind."""
    session.execute(delete(JobEvent).where(JobEvent.job_id == job.id, JobEvent.kind == kind))
    return record(session, job, kind, data, at)
