"""Withdrawing results and jobs, once: what was stored is removed, and a tombstone says who withdrew it, when and why.
The results that follow it on the leaderboard take its place."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from optigpu.documents.views import WithdrawalView, Withdrawn
from optigpu.store import standings
from optigpu.store.database import moment, row_of
from optigpu.store.events import locked
from optigpu.store.statements import take_turns
from optigpu.store.tables import Job, ResultRow, Tombstone, VariantRow
from optigpu.vocabulary import ConflictError, Document, Frozen, JobState


class Withdrawal(Frozen):
    """Why something is withdrawn, and by whom: the name of a key, and its id, null for a caller without a key."""

    reason: str
    withdrawn_by: str
    key_id: str | None = None


def withdraw_result(session: Session, result_id: str, why: Withdrawal) -> WithdrawalView:
    """Withdraws a result. Raises NotFoundError, ConflictError while its job has not ended."""
    take_turns(session, "withdrawals")
    if stone := _stone(session, Withdrawn.RESULT, result_id):
        return stone
    row = row_of(session, ResultRow, Withdrawn.RESULT, result_id)
    if row.job_id is not None:
        job = locked(session, row.job_id)
        if not job.state.is_final:
            raise ConflictError(
                f"Job {job.id} of this result is {job.state}; cancel it or wait until it has ended, then withdraw "
                "the result."
            )
        # Removes a result from its job: from its variant, and the gains computed from it.
        reason = f"Its result was withdrawn: {why.reason}"
        query = select(VariantRow).where(VariantRow.job_id == job.id, VariantRow.result_id == result_id)
        variant = session.scalars(query).one_or_none()
        if variant is not None:
            variant.result_id, variant.reason = None, reason
            if job.attribution:
                job.attribution = _without_gains(job.attribution, variant.index, reason)
        session.flush()
    _remove(session, [result_id])
    return _bury(session, Withdrawn.RESULT, result_id, row.job_id, why)


def withdraw_job(session: Session, job_id: str, why: Withdrawal) -> WithdrawalView:
    """Withdraws a job with its results; a queued one never runs. Raises NotFoundError, ConflictError while it runs."""
    take_turns(session, "withdrawals")
    if stone := _stone(session, Withdrawn.JOB, job_id):
        return stone
    job = locked(session, job_id)
    if job.state is JobState.RUNNING:
        raise ConflictError(
            f"Job {job_id} is running; cancel it and wait until it has ended, then withdraw it."
        )
    query = select(ResultRow.id).where(ResultRow.job_id == job_id).order_by(ResultRow.id)
    results = session.scalars(query).all()
    session.execute(update(VariantRow).where(VariantRow.job_id == job_id).values(result_id=None))
    _remove(session, results)
    for result_id in results:
        _bury(session, Withdrawn.RESULT, result_id, job_id, why)
    session.execute(delete(Job).where(Job.id == job_id))
    return _bury(session, Withdrawn.JOB, job_id, job_id, why)


def is_withdrawn(session: Session, kind: Withdrawn, id_: str) -> bool:
    """Whether it was withdrawn already, so that withdrawing it again changes nothing."""
    return _stone(session, kind, id_) is not None


def _stone(session: Session, kind: Withdrawn, id_: str) -> WithdrawalView | None:
    stone = session.get(Tombstone, id_)
    return stone.as_view(WithdrawalView) if stone is not None and stone.kind is kind else None


def _bury(session: Session, kind: Withdrawn, id_: str, job_id: str | None, why: Withdrawal) -> WithdrawalView:
    stone = Tombstone(id=id_, kind=kind, job_id=job_id, withdrawn_at=moment(session), **why.model_dump())
    session.add(stone)
    session.flush()
    return stone.as_view(WithdrawalView)


def _remove(session: Session, result_ids: Collection[str]) -> None:
    """Removes results; other jobs that were answered with them lose them as well."""
    reused = update(VariantRow).where(VariantRow.result_id.in_(result_ids))
    why = "Its result was withdrawn from the job that measured it."
    session.execute(reused.values(result_id=None, reason=why))
    standings.remove(session, result_ids)


def _without_gains(attribution: Document, index: int, reason: str) -> dict[str, Any]:
    """The attribution without the gains of that variant, and without those that are relative to it."""
    rows = []
    for row in attribution["rows"]:
        own = row["index"] == index
        relative_to = None if own else index
        kept = {name: None if _is_gain(value, relative_to) else value for name, value in row.items()}
        rows.append(kept | {"reason": reason} if own else kept)
    again = attribution.get("baseline_again")
    return dict(attribution) | {
        "rows": rows,
        "best": None if attribution.get("best") == index else attribution.get("best"),
        "baseline_again": None if _is_gain(again, index) else again,
    }


def _is_gain(value: object, compared_with: int | None) -> bool:
    """Whether a value is a gain, relative to that variant; None is any."""
    if not isinstance(value, dict) or "compared_with" not in value:
        return False
    return compared_with is None or value["compared_with"] == compared_with
