"""What users do with jobs: submit, get, list, cancel, put back; and jobs as the service shows them."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session, defer

from optigpu.documents.views import (
    AttemptView,
    JobPage,
    JobSummary,
    JobView,
    ProgressView,
    ReusedView,
    VariantView,
    Withdrawn,
)
from optigpu.job.plan import Need, needs_of
from optigpu.job.spec import JobSpec, digest
from optigpu.store import launches, prospects, queue, transitions
from optigpu.store.database import moment, row_of
from optigpu.store.events import locked, record
from optigpu.store.prospects import Prospects
from optigpu.store.statements import before, clock, encode_cursor, insert_into, like_part
from optigpu.store.tables import Attempt, Base, Job, JobEvent, JobNeed, ResultRow, VariantRow
from optigpu.store.workers import LEASE_S
from optigpu.vocabulary import SCHEMA_VERSION, ConflictError, Document, Frozen, JobState, new_id

_JOBS, _NEEDS, _EVENTS = (Base.metadata.tables[table.__tablename__] for table in (Job, JobNeed, JobEvent))
"""The tables themselves: a row that nobody changes in this transaction needs no object."""

NewRow = dict[str, Any]
"""A row of the table of jobs, by its columns; without the time, which is the database's."""
OPEN = "open"
"""The owner of jobs that were posted without a key."""


class Submitted(Frozen):
    """A job that was posted. `created` is False when the same request had been posted before."""

    job: JobView
    created: bool


def submit(
    session: Session,
    spec: JobSpec,
    *,
    owner: str = OPEN,
    idempotency_key: str | None = None,
    fresh: bool = False,
    lease_s: float = LEASE_S,
) -> Submitted:
    """Enters a job into the queue. With the key of an earlier request and the same spec it is that job; another spec
    raises ConflictError. If results of the very same measurement are there (`store.prospects`), it has ended with them,
    unless `fresh` or the spec says otherwise."""
    needs = needs_of(spec)
    row = _row_of(spec, owner, idempotency_key, needs)
    at = _insert(session, row, needs)
    if at is None:
        job = session.scalars(select(Job).where(Job.idempotency_digest == row["idempotency_digest"])).one()
        if job.spec_digest != row["spec_digest"]:
            raise ConflictError(
                f"This idempotency key was used for job {job.id} with another body; use a new key for a new job."
            )
        return Submitted(job=_view(session, job, lease_s), created=False)
    found = prospects.look(session, [row["id"]], lease_s)[row["id"]]
    answer = None if fresh else prospects.find_answer(session, spec, found)
    if answer is None:
        return Submitted(job=_new_view(row, at, found), created=True)
    job = locked(session, row["id"])
    prospects.enter_answer(session, job, answer, at)
    return Submitted(job=_view(session, job, lease_s), created=True)


def get(session: Session, job_id: str, *, lease_s: float = LEASE_S) -> JobView:
    """The job; a worker that is silent for `lease_s` is not alive. Raises NotFoundError."""
    return _view(session, row_of(session, Job, Withdrawn.JOB, job_id), lease_s)


def list_(
    session: Session,
    *,
    state: JobState | None = None,
    tag: str | None = None,
    parked: bool | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> JobPage:
    """A page of jobs, newest first. Raises CursorError."""
    query = select(Job).options(defer(Job.attribution))
    if state is not None:
        query = query.where(Job.state == state)
    if parked is not None:
        query = query.where(Job.parked.is_(parked))
    if tag is not None:
        # The list as JSON text, in which no tag holds a quotation mark.
        query = query.where(Job.spec["tags"].as_string().contains(f'"{tag}"', autoescape=True))
    if cursor is not None:
        query = query.where(before(cursor, Job.created_at, Job.id))
    jobs = session.scalars(query.order_by(Job.created_at.desc(), Job.id.desc()).limit(limit + 1)).all()
    last = jobs[limit - 1] if len(jobs) > limit else None
    return JobPage(
        jobs=tuple(job.as_view(JobSummary, **_of_spec(job.spec)) for job in jobs[:limit]),
        next_cursor=encode_cursor(last.created_at.isoformat(), last.id) if last else None,
    )


def request_cancel(session: Session, job_id: str, *, lease_s: float = LEASE_S) -> JobView:
    """Cancels a queued job at once; a running one stops as soon as its worker's processes have ended. Changes nothing
    for a job that has ended. Raises NotFoundError."""
    job = locked(session, job_id)
    if job.cancel_requested_at is None and not job.state.is_final:
        at = moment(session)
        job.cancel_requested_at = at
        record(session, job, "cancel_requested", {}, at)
        if job.state is JobState.QUEUED:
            transitions.end(session, job, JobState.CANCELLED, "Cancelled on request, before it began.", at)
    return _view(session, job, lease_s)


def retry(session: Session, job_id: str, *, lease_s: float = LEASE_S) -> JobView:
    """Puts a parked job back into the queue, as if it had never failed. Changes nothing for a job that waits or runs.
    Raises NotFoundError, ConflictError for another that has ended."""
    job = locked(session, job_id)
    if job.state.is_final and not job.parked:
        raise ConflictError(
            f"Job {job_id} is {job.state} and not parked; post it again, with fresh: true to measure it once more."
        )
    if job.parked:
        transitions.revive(session, job, moment(session))
    return _view(session, job, lease_s)


def _insert(session: Session, row: NewRow, needs: Sequence[Need]) -> datetime | None:
    """Enters the job with what it needs and its first event; returns when, or None if its idempotency key is known."""
    new = (
        insert_into(session, _JOBS)
        .values(created_at=clock(session), **row)
        .on_conflict_do_nothing(index_elements=["idempotency_digest"])
        .returning(_JOBS.c.created_at)
    )
    at: datetime | None = session.execute(new).scalar_one_or_none()
    if at is None:
        return None
    if needs:
        asked = [{"job_id": row["id"], "kind": need.kind, "name": need.name} for need in needs]
        session.execute(insert(_NEEDS), asked)
    queued = {"state": JobState.QUEUED.value, "reason": None, "attempt": 0, "worker_id": None}
    event = {"job_id": row["id"], "sequence": 1, "at": at, "kind": "state", "data": queued}
    session.execute(insert(_EVENTS), event)
    return at


def _row_of(spec: JobSpec, owner: str, idempotency_key: str | None, needs: tuple[Need, ...]) -> NewRow:
    document = spec.model_dump(mode="json")
    gpu_pattern = like_part(spec.target.gpu) if spec.target.gpu else None
    asked = sorted((need.kind.value, need.name) for need in needs)
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
        "gpu_pattern": gpu_pattern,
        "min_vram_bytes": spec.target.min_vram_bytes,
        "via": spec.via,
        "owner": owner,
        "lane": digest([owner, gpu_pattern, spec.target.min_vram_bytes, asked, spec.via]),
        "precedence": -spec.priority,
        "deadline": spec.limits.deadline,
        "parked": False,
        "forgiven": 0,
        "idempotency_digest": None if idempotency_key is None else digest(idempotency_key),
        "spec_digest": digest(document),
        "fencing": 0,
        "attempt": 0,
        "last_sequence": 1,
        "progress": {},
    }


ENDED = ProgressView(fraction=1.0, remaining_s=0.0)
"""The progress of a job that has ended, in whatever state: it stands for time, and the state says what came of it."""


def _view(session: Session, job: Job, lease_s: float) -> JobView:
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
        unserved=prospects.reasons(session, [job.id], lease_s).get(job.id),
        launch=launches.last_of(session, job.id) if job.via else None,
        progress=ENDED if job.state.is_final else job.progress,
        attempts=[row.as_view(AttemptView) for row in session.scalars(attempts)],
        variants=[*_variants(session, job)],
    )


def printed(session: Session, job_id: str) -> dict[int, str]:
    """The end of what the processes of a job's variants have printed, by the variants' indexes."""
    query = select(VariantRow.index, VariantRow.printed).where(VariantRow.job_id == job_id)
    return {index: text for index, text in session.execute(query.order_by(VariantRow.index)) if text}


def _new_view(row: Document, created_at: datetime, prospects: Prospects) -> JobView:
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
