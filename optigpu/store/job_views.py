"""Jobs as the service shows them."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.views import (
    AttemptView,
    JobSummary,
    JobView,
    ProgressView,
    ReusedView,
    VariantView,
)
from optigpu.store import launches, queue, unserved
from optigpu.store.database import moment
from optigpu.store.tables import Attempt, Job, ResultRow, VariantRow
from optigpu.store.unserved import Prospects
from optigpu.vocabulary import Document, JobState

ENDED = ProgressView(fraction=1.0, remaining_s=0.0)
"""The progress of a job that has ended, in whatever state: it stands for time, and the state says what came of it."""


def summary(job: Job) -> JobSummary:
    """The job in a list."""
    return job.as_view(JobSummary, **_of_spec(job.spec))


def view(session: Session, job: Job, lease_s: float) -> JobView:
    """The job as it is now, whole."""
    attempts = select(Attempt).where(Attempt.job_id == job.id).order_by(Attempt.number)
    place = begins = None
    if job.state is JobState.QUEUED and job.via is None:
        at = moment(session)
        place = queue.position(session, job, at)
        begins = queue.estimated_start(session, job, place, lease_s, at)
    return job.as_view(
        JobView,
        **_of_spec(job.spec),
        queue_position=place,
        estimated_start_at=begins,
        unserved=unserved.reasons(session, [job.id], lease_s).get(job.id),
        launch=launches.last_of(session, job.id) if job.via else None,
        progress=ENDED if job.state.is_final else job.progress,
        attempts=[row.as_view(AttemptView) for row in session.scalars(attempts)],
        variants=[*_variants(session, job)],
    )


def printed(session: Session, job_id: str) -> dict[int, str]:
    """The end of what the processes of a job's variants have printed, by the variants' indexes."""
    query = select(VariantRow.index, VariantRow.printed).where(VariantRow.job_id == job_id)
    return {index: text for index, text in session.execute(query.order_by(VariantRow.index)) if text}


def new_view(row: Document, created_at: datetime, prospects: Prospects) -> JobView:
    """A job that was just entered, from its row; its place is not looked up, which would read the whole queue."""
    spec = row["spec"]
    return JobView(
        id=row["id"],
        state=JobState.QUEUED,
        created_at=created_at,
        **{name: row[name] for name in ("workload", "model", "plan", "device", "schema_version")},
        **_of_spec(spec),
        unserved=prospects.unserved,
        spec=spec,
    )


def _of_spec(spec: Document) -> dict[str, Any]:
    return {"name": spec.get("name"), "tags": spec.get("tags", ()), "priority": spec.get("priority", 0)}


def _variants(session: Session, job: Job) -> Iterator[VariantView]:
    query = (
        select(VariantRow, ResultRow.job_id, ResultRow.created_at)
        .outerjoin(ResultRow, ResultRow.id == VariantRow.result_id)
        .where(VariantRow.job_id == job.id)
        .order_by(VariantRow.index)
    )
    for row, measured_by, measured_at in session.execute(query):
        reused = None
        if row.result_id is not None and measured_by != job.id:
            age_s = (job.created_at - measured_at).total_seconds()
            reused = ReusedView(job_id=measured_by, measured_at=measured_at, age_s=age_s)
        yield row.as_view(VariantView, reused=reused)
