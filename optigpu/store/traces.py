"""The trace that a job belongs to: kept as an event of the job, by whoever posts it while traces are recorded."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.store.events import append
from optigpu.store.tables import JobEvent

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
