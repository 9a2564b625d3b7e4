"""What users do with jobs: submit, get, list, cancel."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import literal, select, tuple_
from sqlalchemy.orm import Session, defer

from optigpu.documents.views import (
    AttemptView,
    JobPage,
    JobSummary,
    JobView,
    ProgressView,
    VariantView,
    Withdrawn,
)
from optigpu.job.needs import needs_of
from optigpu.job.spec import JobSpec, digest
from optigpu.store import queue, unserved
from optigpu.store.cursors import bad_cursor, decode_cursor, encode_cursor
from optigpu.store.database import moment
from optigpu.store.events import locked, record
from optigpu.store.statements import insert_into
from optigpu.store.tables import Attempt, Job, JobNeed, VariantRow
from optigpu.store.tombstones import absent
from optigpu.store.transitions import announce, end
from optigpu.store.workers import LEASE_S
from optigpu.vocabulary import (
    SCHEMA_VERSION,
    ConflictError,
    Frozen,
    JobState,
    new_id,
)

ENDED = ProgressView(fraction=1.0, remaining_s=0.0)
"""The progress of a job that has ended, in whatever state: it stands for time, and the state says what came of it."""


class Submitted(Frozen):
    """A job that was posted. `created` is False when the same request had been posted before."""

    job: JobView
    created: bool


def submit(
    session: Session, spec: JobSpec, *, idempotency_key: str | None = None, lease_s: float = LEASE_S
) -> Submitted:
    """Enters a job at the end of the queue; the caller rings the doorbell after the commit.

    With the key of an earlier request and the same spec it is that job. Raises ConflictError for another spec.
    """
    row = _row_of(spec, idempotency_key) | {"created_at": moment(session)}
    insert = (
        insert_into(session, Job).values(row).on_conflict_do_nothing(index_elements=["idempotency_digest"])
    )
    created = session.scalars(insert.returning(Job.id)).one_or_none() is not None
    if created:
        session.add_all(JobNeed(job_id=row["id"], kind=need.kind, name=need.name) for need in needs_of(spec))
        job = locked(session, row["id"])
        announce(session, job, job.created_at)
    else:
        job = session.scalars(select(Job).where(Job.idempotency_digest == row["idempotency_digest"])).one()
        if job.spec_digest != row["spec_digest"]:
            raise ConflictError(
                f"This idempotency key was used for job {job.id} with another body; use a new key for a new job."
            )
    return Submitted(job=_view(session, job, lease_s), created=created)


def get(session: Session, job_id: str, *, lease_s: float = LEASE_S) -> JobView:
    """The job with its attempts and variants; a worker that is silent for `lease_s` is not alive.

    Raises NotFoundError.
    """
    job = session.get(Job, job_id)
    if job is None:
        raise absent(session, Withdrawn.JOB, job_id)
    return _view(session, job, lease_s)


def list_(
    session: Session,
    *,
    state: JobState | None = None,
    tag: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> JobPage:
    """A page of jobs, newest first. Raises CursorError."""
    query = select(Job).options(defer(Job.attribution))
    if state is not None:
        query = query.where(Job.state == state)
    if tag is not None:
        # The list as JSON text, in which no tag holds a quotation mark.
        query = query.where(Job.spec["tags"].as_string().contains(f'"{tag}"', autoescape=True))
    if cursor is not None:
        at, job_id = _position(cursor)
        query = query.where(
            tuple_(Job.created_at, Job.id) < tuple_(literal(at, Job.created_at.type), literal(job_id))
        )
    jobs = session.scalars(query.order_by(Job.created_at.desc(), Job.id.desc()).limit(limit + 1)).all()
    last = jobs[limit - 1] if len(jobs) > limit else None
    return JobPage(
        jobs=tuple(JobSummary(**_summary(job)) for job in jobs[:limit]),
        next_cursor=encode_cursor(last.created_at.isoformat(), last.id) if last else None,
    )


def request_cancel(session: Session, job_id: str, *, lease_s: float = LEASE_S) -> JobView:
    """Cancels a queued job at once; a running one stops as soon as its worker's processes have ended.

    Changes nothing for a job that has ended or was asked before. Raises NotFoundError.
    """
    job = locked(session, job_id)
    if job.cancel_requested_at is None and not job.state.is_final:
        at = moment(session)
        job.cancel_requested_at = at
        record(session, job, "cancel_requested", {}, at)
        if job.state is JobState.QUEUED:
            end(session, job, JobState.CANCELLED, "Cancelled on request, before it began.", at)
    return _view(session, job, lease_s)


def _row_of(spec: JobSpec, idempotency_key: str | None) -> dict[str, Any]:
    document = spec.model_dump(mode="json")
    return {
        "id": new_id(),
        "state": JobState.QUEUED,
        "schema_version": SCHEMA_VERSION,
        "spec": document,
        "workload": spec.workload.kind,
        "model": ", ".join(filter(None, spec.asked_models)) or None,
        "plan": spec.plan,
        "backend": spec.backend,
        "device": spec.device,
        "gpu_pattern": _like(spec.target.gpu) if spec.target.gpu else None,
        "min_vram_bytes": spec.target.min_vram_bytes,
        "idempotency_digest": None if idempotency_key is None else digest(idempotency_key),
        "spec_digest": digest(document),
        "fencing": 0,
        "attempt": 0,
        "last_sequence": 0,
        "progress": {},
    }


def _like(part: str) -> str:
    """The LIKE pattern, escaped by a backslash, of texts that contain `part`."""
    escaped = part.lower().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _position(cursor: str) -> tuple[datetime, str]:
    text, job_id = decode_cursor(cursor, str, str)
    try:
        at = datetime.fromisoformat(text)
        return at.astimezone(UTC), job_id
    except (ValueError, OverflowError):
        raise bad_cursor() from None


def _summary(job: Job) -> dict[str, Any]:
    shown = ("id", "state", "created_at", "started_at", "ended_at", "cancel_requested_at", "reason")
    asked = ("workload", "model", "plan", "device")
    columns = {name: getattr(job, name) for name in shown + asked}
    return columns | {"name": job.spec.get("name"), "tags": job.spec.get("tags", ())}


def _view(session: Session, job: Job, lease_s: float) -> JobView:
    attempts = session.scalars(select(Attempt).where(Attempt.job_id == job.id).order_by(Attempt.number))
    variants = session.scalars(
        select(VariantRow).where(VariantRow.job_id == job.id).order_by(VariantRow.index)
    )
    return JobView(
        **_summary(job),
        queue_position=queue.position(session, job),
        unserved=unserved.reasons(session, [job.id], lease_s).get(job.id),
        progress=ENDED if job.state.is_final else ProgressView(**job.progress),
        attempts=tuple(_attempt_view(attempt) for attempt in attempts),
        variants=tuple(_variant_view(variant) for variant in variants),
        spec=job.spec,
        schema_version=job.schema_version,
        attribution=job.attribution,
    )


def _attempt_view(row: Attempt) -> AttemptView:
    return AttemptView(
        number=row.number,
        worker_id=row.worker_id,
        started_at=row.started_at,
        ended_at=row.ended_at,
        outcome=row.outcome,
    )


def _variant_view(row: VariantRow) -> VariantView:
    return VariantView(
        index=row.index,
        role=row.role,
        label=row.label,
        status=row.status,
        reason=row.reason,
        result_id=row.result_id,
    )
