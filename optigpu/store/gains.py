"""What techniques bought, by the attributions of the newest jobs."""

from collections.abc import Iterable, Iterator
from datetime import datetime

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.result import Attribution, Gain
from optigpu.store.tables import Job, LeaderboardEntry, VariantRow
from optigpu.vocabulary import Frozen

MOST_JOBS = 200


class MeasuredGain(Frozen):
    """The speedup of one technique alone, in one job."""

    technique: str
    gain: Gain
    job_id: str
    result_id: str
    model: str | None
    hardware: str
    measured_at: datetime


def alone(session: Session) -> list[MeasuredGain]:
    """The valid ones of the newest jobs that have an attribution, the newest first."""
    query = select(Job.id, Job.attribution).where(Job.attribution.is_not(None))
    found = session.execute(query.order_by(Job.created_at.desc()).limit(MOST_JOBS)).all()
    places = _places(session, [row.id for row in found])
    return [gain for row in found for gain in _gains(row.id, row.attribution, places)]


def _places(session: Session, jobs: Iterable[str]) -> dict[tuple[str, int], LeaderboardEntry]:
    """The entries of jobs' variants, by the job and the index."""
    query = (
        select(VariantRow.job_id, VariantRow.index, LeaderboardEntry)
        .join(LeaderboardEntry, LeaderboardEntry.result_id == VariantRow.result_id)
        .where(VariantRow.job_id.in_(list(jobs)))
    )
    return {(job, index): entry for job, index, entry in session.execute(query)}


def _gains(
    job: str, document: object, places: dict[tuple[str, int], LeaderboardEntry]
) -> Iterator[MeasuredGain]:
    try:
        rows = Attribution.model_validate(document).rows
    except ValidationError:  # of another version
        return
    for row in rows:
        entry = places.get((job, row.index))
        if entry is not None and row.technique and row.alone is not None and row.alone.valid:
            yield MeasuredGain(
                technique=row.technique,
                gain=row.alone,
                job_id=job,
                result_id=entry.result_id,
                model=entry.model,
                hardware=entry.hardware_class,
                measured_at=entry.measured_at,
            )
