"""The state of the service now, for its monitoring: jobs by state, what waits for which kind of device, the workers."""

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from optigpu.documents.views import WorkerView
from optigpu.store import queue, workers
from optigpu.store.database import moment
from optigpu.store.tables import Job
from optigpu.vocabulary import DeviceKind, Frozen, JobState


class Waiting(Frozen):
    """The jobs that wait for workers of one kind of device: how many, and how long the oldest has waited."""

    count: int
    oldest_s: float


class Figures(Frozen):
    """One state of the database. `waiting` has no entry for a kind of device for which nothing is queued."""

    at: datetime
    jobs: dict[JobState, int]
    waiting: dict[DeviceKind, Waiting]
    workers: tuple[WorkerView, ...]


def read(session: Session, lease_s: float) -> Figures:
    """Reads the figures by the indexes of the queue; a worker that is silent for `lease_s` is not alive."""
    at = moment(session)
    return Figures(
        at=at,
        jobs=queue.counts(session),
        waiting=_waiting(session, at),
        workers=tuple(workers.list_(session, lease_s=lease_s, now=at)),
    )


def _waiting(session: Session, at: datetime) -> dict[DeviceKind, Waiting]:
    query = (
        select(Job.device, func.count(), func.min(Job.created_at))
        .where(Job.state == JobState.QUEUED, Job.via.is_(None))
        .group_by(Job.device)
    )
    return {
        device: Waiting(count=count, oldest_s=max(0.0, (at - oldest).total_seconds()))
        for device, count, oldest in session.execute(query)
    }
