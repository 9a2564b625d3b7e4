"""Runs that were measured elsewhere: each becomes a job that has ended, with its results, all or nothing."""

from collections.abc import Iterator

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.events import PlannedVariant
from optigpu.documents.older import why_none_ranks
from optigpu.documents.result import Outcome
from optigpu.documents.runs import RunDocument
from optigpu.documents.views import JobView
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.store import jobs, outcomes
from optigpu.store.database import moment
from optigpu.store.events import locked
from optigpu.store.leases import Lease
from optigpu.store.tables import ResultRow
from optigpu.vocabulary import ConflictError, JobState

IMPORTED = "import"
"""In place of a worker's id."""


def add(session: Session, run: RunDocument, spec: JobSpec) -> JobView:
    """Enters the run as a job that has ended; `spec` is its request. Raises ConflictError if it is here already."""
    _refuse_known(session, run)
    lease = _taken(session, spec)
    planned = [
        PlannedVariant(index=each.index, role=each.role, label=each.label) for each in variants_of(spec)
    ]
    outcomes.plan(session, lease, planned)
    for outcome in _outcomes(run):
        outcomes.save_outcome(session, lease, outcome)
    state = JobState.SUCCEEDED if run.results else JobState.FAILED
    measured = f"Imported; it was measured on {run.created_at:%Y-%m-%d} outside of this service."
    unranked = why_none_ranks([result.model_dump(mode="json") for result in run.results])
    reason = " ".join(filter(None, (run.stopped, unranked, measured)))
    outcomes.finish(session, lease, state, reason, run.attribution)
    return jobs.get(session, lease.job_id)


def _refuse_known(session: Session, run: RunDocument) -> None:
    ids = [result.id for result in run.results]
    known = session.scalars(select(ResultRow.job_id).where(ResultRow.id.in_(ids)).limit(1)).first()
    if known is not None:
        raise ConflictError(f"This run is here already, as job {known}.")


def _taken(session: Session, spec: JobSpec) -> Lease:
    """A new job that no worker can take: it runs under this lease from the transaction's beginning to its end."""
    job = locked(session, jobs.submit(session, spec, fresh=True).job.id)
    job.state, job.started_at, job.fencing = JobState.RUNNING, moment(session), job.fencing + 1
    session.flush()
    return Lease(job_id=job.id, spec=spec, fencing=job.fencing, attempt=job.attempt, worker_id=IMPORTED)


def _outcomes(run: RunDocument) -> Iterator[Outcome]:
    """The run's outcomes, each with its result. A variant of the plan that has none is cancelled at the end."""
    results = {result.variant.index: result for result in run.results}
    for kept in run.outcomes:
        result = results.get(kept.index)
        reason = None if result else kept.reason or "The run does not say why."
        yield Outcome(
            index=kept.index, status=kept.status, reason=reason, result=result, samples=kept.samples
        )
