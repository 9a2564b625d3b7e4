"""Writes of the worker that holds a job: the plan, each variant's outcome, the end."""

from collections.abc import Sequence
from typing import assert_never

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from optigpu.documents.events import (
    Estimated,
    Noted,
    Planned,
    PlannedVariant,
    Printed,
    RoughlyMeasured,
    VariantFinished,
    VariantStarted,
    Waiting,
    as_document,
)
from optigpu.documents.result import Attribution, Outcome, Result
from optigpu.documents.versions import RunDocument, current, why_none_ranks
from optigpu.documents.views import JobView, Withdrawn
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.store import jobs, results, standings
from optigpu.store.database import absent, moment
from optigpu.store.events import FINISHED, VARIANT_FINISHED, locked, record
from optigpu.store.leases import Hold, Lease, held
from optigpu.store.results import Artifact
from optigpu.store.statements import clean_text
from optigpu.store.tables import Job, ResultRow, Tombstone, VariantRow
from optigpu.store.transitions import end
from optigpu.vocabulary import (
    ConflictError,
    DocumentError,
    JobState,
    LeaseLostError,
    NotFoundError,
    StoreError,
    VariantStatus,
    check_document,
)

IMPORTED = "import"
"""In place of a worker's id."""
LONGEST_PRINTED = 16_000
"""Of what a variant's processes have printed."""


def note(session: Session, lease: Lease, event: Noted) -> None:
    """Stores an event of the run. Raises LeaseLostError, NotFoundError for a variant that is not in the plan."""
    match event:
        case Planned():
            plan(session, lease, event.variants)
        case VariantStarted():
            variant_started(session, lease, event.index)
        case Printed():
            printed(session, lease, event)
        case Estimated() | Waiting() | RoughlyMeasured():
            record(session, held(session, lease), event.kind, as_document(event), moment(session))
        case _:
            assert_never(event)


def plan(session: Session, lease: Lease, variants: Sequence[PlannedVariant]) -> None:
    """Enters the job's variants, once; those in `lease.done` keep their outcome. Raises LeaseLostError."""
    job = held(session, lease)
    rows = session.scalars(select(VariantRow).where(VariantRow.job_id == job.id).order_by(VariantRow.index))
    if [(row.index, row.role, row.label) for row in rows] == [(v.index, v.role, v.label) for v in variants]:
        return
    replaced = VariantRow.job_id == job.id, VariantRow.index.not_in(lease.done)
    session.execute(delete(VariantRow).where(*replaced))
    for variant in variants:
        if variant.index not in lease.done:
            session.add(VariantRow(job_id=job.id, status=VariantStatus.PENDING, **variant.model_dump()))
    record(session, job, "planned", as_document(Planned(variants=tuple(variants))), moment(session))


def earlier(session: Session, lease: Lease) -> dict[int, Outcome]:
    """The outcomes of the variants in `lease.done`, by their index, with raw samples and without files."""
    query = select(VariantRow).where(VariantRow.job_id == lease.job_id, VariantRow.index.in_(lease.done))
    return {row.index: _stored_outcome(session, row) for row in session.scalars(query)}


def _stored_outcome(session: Session, row: VariantRow) -> Outcome:
    if row.result_id is None:
        return Outcome(index=row.index, status=row.status, reason=row.reason)
    # The lease keeps an earlier outcome only if it is of this version, whose schema may have changed since its release.
    result = Result.model_validate(current(results.get(session, row.result_id)))
    samples = results.samples(session, row.result_id).samples
    return Outcome(index=row.index, status=row.status, result=result, samples=samples)


def variant_started(session: Session, lease: Lease, index: int) -> None:
    """The first process of a variant starts; saying so again changes nothing. Raises LeaseLostError, NotFoundError."""
    job = held(session, lease)
    variant = _variant(session, job, index)
    if variant.status is VariantStatus.RUNNING:
        return
    variant.status = VariantStatus.RUNNING
    record(session, job, "variant_started", as_document(VariantStarted(index=index)), moment(session))


def printed(session: Session, lease: Lease, event: Printed) -> None:
    """A process of a variant printed this; the last LONGEST_PRINTED characters are kept. Raises LeaseLostError,
    NotFoundError."""
    variant = _variant(session, held(session, lease), event.index)
    before = f"{variant.printed}\n\n" if variant.printed else ""
    variant.printed = clean_text(f"{before}{event.text}")[-LONGEST_PRINTED:]


def save_outcome(session: Session, lease: Lease, outcome: Outcome, kept: Sequence[Artifact] = ()) -> None:
    """Stores how a variant ended: its result, samples, files (`kept`, as they were read), place on the leaderboard and
    event, all or none, and once. A result that no database can hold makes the variant failed, with that reason. Raises
    LeaseLostError, NotFoundError."""
    job = held(session, lease)
    variant = _variant(session, job, outcome.index)
    if outcome.result is None:
        outcome = outcome.model_copy(update={"reason": clean_text(outcome.reason or "")})
    else:
        result = outcome.result.model_copy(update={"job_id": job.id})
        outcome = _storable(outcome.model_copy(update={"result": result}))
    result_id = outcome.result.id if outcome.result else None
    now = outcome.status, outcome.reason, result_id
    if (variant.status, variant.reason, variant.result_id) == now:
        return
    if outcome.result is not None:
        results.add(session, outcome.result, outcome.samples)
        results.add_artifact(session, outcome.result.id, kept)
        standings.enter(session, outcome.result)
    variant.status, variant.reason, variant.result_id = now
    told = dict(zip(("index", "status", "reason", "result_id"), (outcome.index, *now), strict=True))
    record(session, job, VARIANT_FINISHED, {"kind": VARIANT_FINISHED, "outcome": told}, moment(session))


def finish(
    session: Session,
    lease: Hold,
    state: JobState,
    reason: str | None = None,
    attribution: Attribution | None = None,
) -> None:
    """Ends the job. Finishing it again in the same way changes nothing. Raises LeaseLostError."""
    if not state.is_final:
        raise StoreError(f"A job cannot finish as {state}; use succeeded, failed or cancelled.")
    try:
        job = held(session, lease)
    except LeaseLostError:
        ended = Job.id == lease.job_id, Job.fencing == lease.fencing, Job.state == state
        if session.scalars(select(Job.id).where(*ended)).one_or_none() is None:
            raise
        return
    at = moment(session)
    if attribution is not None:
        job.attribution = attribution.model_dump(mode="json")
        record(session, job, FINISHED, {"kind": FINISHED}, at)
    end(session, job, state, reason, at)


def enter_run(session: Session, run: RunDocument, spec: JobSpec) -> JobView:
    """Enters a run that was measured elsewhere as a job that has ended, with its results, all or nothing; `spec` is its
    request. Raises ConflictError if it is here already, or any of its results was withdrawn."""
    ids = [result.id for result in run.results]
    known = select(ResultRow.job_id).where(ResultRow.id.in_(ids))
    if (job_id := session.scalars(known.limit(1)).first()) is not None:
        raise ConflictError(f"This run is here already, as job {job_id}.")
    buried = select(Tombstone.id).where(Tombstone.id.in_(ids), Tombstone.kind == Withdrawn.RESULT)
    if (result_id := session.scalars(buried.order_by(Tombstone.id).limit(1)).first()) is not None:
        raise ConflictError(f"{absent(session, Withdrawn.RESULT, result_id)} Its run is not entered again.")
    # No worker can take it: it runs under this lease from the transaction's beginning to its end.
    job = locked(session, jobs.submit(session, spec, fresh=True).job.id)
    job.state, job.started_at, job.fencing = JobState.RUNNING, moment(session), job.fencing + 1
    session.flush()
    lease = Lease(job_id=job.id, spec=spec, fencing=job.fencing, attempt=job.attempt, worker_id=IMPORTED)
    planned = [
        PlannedVariant(index=each.index, role=each.role, label=each.label) for each in variants_of(spec)
    ]
    plan(session, lease, planned)
    measured = {result.variant.index: result for result in run.results}
    for kept in run.outcomes:  # a variant of the plan that has none is cancelled at the end
        result = measured.get(kept.index)
        reason = None if result else kept.reason or "The run does not say why."
        known_outcome = kept.model_dump(exclude={"reason"})
        save_outcome(session, lease, Outcome(**known_outcome, reason=reason, result=result))
    state = JobState.SUCCEEDED if run.results else JobState.FAILED
    told = f"Imported; it was measured on {run.created_at:%Y-%m-%d} outside of this service."
    unranked = why_none_ranks([result.model_dump(mode="json") for result in run.results])
    finish(session, lease, state, " ".join(filter(None, (run.stopped, unranked, told))), run.attribution)
    return jobs.get(session, job.id)


def _variant(session: Session, job: Job, index: int) -> VariantRow:
    query = select(VariantRow).where(VariantRow.job_id == job.id, VariantRow.index == index)
    row = session.scalars(query).one_or_none()
    if row is None:
        raise NotFoundError(f"Job {job.id} has no variant {index}; enter its plan first.")
    return row


def _storable(outcome: Outcome) -> Outcome:
    try:
        check_document(as_document(VariantFinished(outcome=outcome)))
    except DocumentError as error:
        reason = f"Its result cannot be stored: {error}"
        return Outcome(index=outcome.index, status=VariantStatus.FAILED, reason=reason)
    return outcome
