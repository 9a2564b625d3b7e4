"""Results that are there already: a job that asks for the very same measurement need not be measured again. A result
stands for a variant if it is valid, of the same digests (which hold the hash of the weights), seed, versions and class
of hardware, and was measured at least as thoroughly."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from pydantic import ValidationError
from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from optigpu.documents.result import Attribution, AttributionRow, VerdictWarning
from optigpu.documents.versions import versions_of
from optigpu.documents.views import RowFacts, Standing
from optigpu.job.measured import as_measured
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Limits, Measure, PlanName, Variant
from optigpu.store.entries import board_number
from optigpu.store.tables import Job, LeaderboardEntry, ResultRow, VariantRow
from optigpu.store.transitions import end
from optigpu.store.unserved import Prospects
from optigpu.vocabulary import Document, Frozen, JobState, VariantStatus

MEASURED_BY_A_WORKER = "worker"
"""The source of results that count here: those of other sources may have been measured in other ways."""


class Candidate(Frozen):
    """A valid result of the right digests and hardware, with what its job asked for and where it was in its plan."""

    result_id: str
    variant_digest: str
    measured_at: datetime
    shown: Document
    warnings: str
    job_id: str
    plan: str
    spec: Document
    index: int


class Answer(Frozen):
    """What a job asks for, from results that are there."""

    variants: tuple[Variant, ...]
    kept: tuple[Candidate, ...]
    attribution: Document


def find(session: Session, spec: JobSpec, prospects: Prospects) -> Answer | None:
    """The answer from results that are there; None if any variant must be measured. The variants of a plan that
    compares them must have been measured by one job: only then they took turns."""
    classes = {worker.hardware_class for worker in prospects.able}
    if spec.fresh or spec.plan is PlanName.SEARCH or len(classes) != 1:
        return None
    variants = variants_of(spec)
    measured = [known for variant in variants if (known := as_measured(variant))]
    if len(measured) < len(variants):
        return None
    software = [worker.software for worker in prospects.able]
    rows = [
        row
        for row in _candidates(session, measured, classes.pop())
        if _is_of(row, software) and _suffices(row.spec, row.warnings, spec)
    ]
    if spec.plan is PlanName.SINGLE and not spec.beside:
        return _apart(spec, measured, rows)
    return _together(session, spec, measured, rows)


def enter(session: Session, job: Job, answer: Answer, at: datetime) -> None:
    """Ends a queued job that nobody has taken with these results."""
    for variant, kept in zip(answer.variants, answer.kept, strict=True):
        planned = {"index": variant.index, "role": variant.role, "label": variant.label}
        row = VariantRow(job_id=job.id, status=VariantStatus.SUCCEEDED, result_id=kept.result_id, **planned)
        session.add(row)
    job.attribution = dict(answer.attribution)
    oldest = min(each.measured_at for each in answer.kept)
    sentence = (
        f"Measured before, since {oldest:%Y-%m-%d %H:%M} UTC: its results are those of the very same measurement. "
        "Post the job with fresh: true to measure it again."
    )
    end(session, job, JobState.SUCCEEDED, sentence, at)


def _candidates(session: Session, variants: Sequence[Variant], hardware_class: str) -> Sequence[Candidate]:
    """Valid results of any of the variants, the current one of each place first, then the newest."""
    entry = LeaderboardEntry
    here = (
        entry.board.in_(
            {board_number(variant.workload_digest, MEASURED_BY_A_WORKER) for variant in variants}
        ),
        entry.variant_digest.in_({variant.digest for variant in variants}),
        entry.hardware_class == hardware_class,
        entry.standing != Standing.INVALID,
    )
    of_job = and_(VariantRow.job_id == ResultRow.job_id, VariantRow.result_id == ResultRow.id)
    query = (
        select(
            *(entry.result_id, entry.variant_digest, entry.measured_at, entry.shown),
            *(entry.warnings, Job.id.label("job_id"), Job.plan, Job.spec, VariantRow.index),
        )
        .join(ResultRow, ResultRow.id == entry.result_id)
        .join(Job, Job.id == ResultRow.job_id)
        .join(VariantRow, of_job)
        .where(*here)
    )
    is_earlier = entry.standing != Standing.CURRENT
    found = session.execute(query.order_by(is_earlier, entry.measured_at.desc()))
    return [Candidate.model_validate(row, from_attributes=True) for row in found]


def _is_of(row: Candidate, software: Iterable[Mapping[str, str]]) -> bool:
    """Whether each worker that may take the job has the versions with which this was measured, of what is compared."""
    shown = RowFacts.model_validate(row.shown)
    of_each = [versions_of(shown.backend, each) for each in software]
    return bool(shown.versions) and all(versions == shown.versions for versions in of_each)


def _suffices(earlier: Document, warnings: str, spec: JobSpec) -> bool:
    """Whether a result of that job says at least what this one asks for."""
    if VerdictWarning.INCOMPLETE in warnings.split() or earlier.get("seed") != spec.seed:
        return False
    try:
        had, limits = Measure.model_validate(earlier["measure"]), Limits.model_validate(earlier["limits"])
    except (KeyError, ValidationError):  # of a version whose jobs were written otherwise
        return False
    asked = spec.measure
    return (
        (limits.max_kld, limits.min_top1) == (spec.limits.max_kld, spec.limits.min_top1)
        and (had.quality, had.raise_priority) == (asked.quality, asked.raise_priority)
        and had.replicates >= asked.replicates
        and had.min_seconds >= asked.min_seconds
        and had.rel_ci <= asked.rel_ci
        and set(had.meters) >= set(asked.meters)
    )


def _apart(spec: JobSpec, variants: Sequence[Variant], rows: Sequence[Candidate]) -> Answer | None:
    """Each variant's own result, of whatever job."""
    best: dict[str, Candidate] = {}
    for row in rows:
        best.setdefault(row.variant_digest, row)
    if any(variant.digest not in best for variant in variants):
        return None
    status = VariantStatus.SUCCEEDED
    gains = [
        AttributionRow(index=each.index, role=each.role, label=each.label, status=status) for each in variants
    ]
    attribution = Attribution(metric=spec.primary, rows=tuple(gains)).model_dump(mode="json")
    kept = tuple(best[variant.digest] for variant in variants)
    return Answer(variants=tuple(variants), kept=kept, attribution=attribution)


def _together(
    session: Session, spec: JobSpec, variants: Sequence[Variant], rows: Sequence[Candidate]
) -> Answer | None:
    """The results of one job that had this plan, with the gains that it found."""
    by_job: dict[str, dict[tuple[int, str], Candidate]] = {}
    for row in rows:
        if row.plan == spec.plan:
            by_job.setdefault(row.job_id, {})[row.index, row.variant_digest] = row
    wanted = [(variant.index, variant.digest) for variant in variants]
    job_id, found = next(
        ((job, found) for job, found in by_job.items() if found.keys() >= {*wanted}), ("", {})
    )
    planned = select(func.count()).select_from(VariantRow).where(VariantRow.job_id == job_id)
    gains = session.scalars(select(Job.attribution).where(Job.id == job_id)).one_or_none()
    if gains is None or session.scalars(planned).one() != len(variants):
        return None
    kept = tuple(found[place] for place in wanted)
    return Answer(variants=tuple(variants), kept=kept, attribution=gains)
