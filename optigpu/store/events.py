"""A job's events, numbered from 1 in their order. Newer progress replaces older; all others are kept.
`variant_finished` names its result, and `finished` says only that there is an attribution; both are read where they are
stored, so that what is withdrawn is gone from the events as well. Besides the engine's own kinds there are `state`
(state, reason, attempt, worker_id), `cancel_requested`, and `traced`."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from optigpu.documents.views import EventView, Withdrawn
from optigpu.store import results
from optigpu.store.database import absent
from optigpu.store.tables import Job, JobEvent, VariantRow
from optigpu.vocabulary import Document, Frozen

VARIANT_FINISHED, FINISHED = "variant_finished", "finished"


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
    query = select(JobEvent).where(JobEvent.job_id == job_id, JobEvent.sequence > sequence)
    found = session.scalars(query.order_by(JobEvent.sequence).limit(limit)).all()
    whole = _whole(session, job_id, found)
    return [event.as_view(EventView, data=whole(event)) for event in found]


def rough(session: Session, job_id: str) -> dict[int, Document]:
    """The newest rough figures of each variant, by its index."""
    query = select(JobEvent.data).where(JobEvent.job_id == job_id, JobEvent.kind == "rough")
    return {data["index"]: data["rough"] for data in session.scalars(query.order_by(JobEvent.sequence))}


def _whole(session: Session, job_id: str, found: Sequence[JobEvent]) -> Callable[[JobEvent], dict[str, Any]]:
    """Gives the data of an event with the result or the attribution that it stands for."""
    outcomes = {event.sequence: event.data["outcome"] for event in found if event.kind == VARIANT_FINISHED}
    # The version before wrote the whole result.
    names = {
        sequence: told.get("result_id") or (told.get("result") or {}).get("id")
        for sequence, told in outcomes.items()
    }
    named = results.by_id(session, [each for each in names.values() if each])
    gone = set(names.values()) - set(named) - {None}
    of_variant = select(VariantRow.index, VariantRow.reason).where(VariantRow.job_id == job_id)
    reasons = {row.index: row.reason for row in session.execute(of_variant)} if gone else {}
    is_finished = any(event.kind == FINISHED for event in found)
    attribution = session.scalar(select(Job.attribution).where(Job.id == job_id)) if is_finished else None

    def data(event: JobEvent) -> dict[str, Any]:
        if event.kind == FINISHED:
            return event.data if attribution is None else event.data | {"attribution": attribution}
        if event.kind != VARIANT_FINISHED:
            return event.data
        name, told = names[event.sequence], outcomes[event.sequence]
        outcome = {"index": told["index"], "status": told["status"], "reason": told["reason"]}
        if name in gone:
            outcome["reason"] = reasons.get(told["index"])
        return event.data | {"outcome": outcome | {"result": named.get(name) if name else None}}

    return data


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
