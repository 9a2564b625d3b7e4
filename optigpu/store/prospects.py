"""What awaits a posted job: a worker that can take it, or why no live one can, or results that are there already.

Why it waits is a sentence for the person who posted it, found out whenever a job is read. A job that asks for the very
same measurement need not be measured again: a result stands for a variant if it is valid, of the same digests (which
hold the hash of the weights), seed, versions and class of hardware, and was measured at least as thoroughly.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime

from pydantic import ValidationError
from sqlalchemy import and_, func, not_, select
from sqlalchemy.orm import Session

from optigpu.documents.result import Attribution, AttributionRow, VerdictWarning
from optigpu.documents.versions import versions_of
from optigpu.documents.views import RowFacts, Standing, Unserved, Want, WorkerView
from optigpu.job.measured import as_measured
from optigpu.job.plan import FOLDER, HUB, Need, variants_of
from optigpu.job.spec import JobSpec, Limits, Measure, PlanName, Variant
from optigpu.store import launches, workers
from optigpu.store.entries import board_number
from optigpu.store.queue import device_fits, has
from optigpu.store.tables import Job, JobNeed, LeaderboardEntry, ResultRow, VariantRow
from optigpu.store.transitions import end
from optigpu.vocabulary import DeviceKind, Document, Frozen, JobState, VariantStatus

MOST_NAMES = 8
"""How many names a sentence lists."""
CAPABILITIES = {
    *("device", "hardware_class", "gpus", "vram_bytes"),
    *("backends", "packages", "models", "downloads", "software"),
}

Lacking = tuple[WorkerView, AbstractSet[Need]]
"""A worker, and what it lacks for one job."""


def reasons(session: Session, job_ids: Sequence[str], lease_s: float) -> dict[str, Unserved]:
    """By its id why each of these jobs waits, if it is queued and no worker seen within `lease_s` can take it."""
    found = look(session, job_ids, lease_s)
    return {job_id: each.unserved for job_id, each in found.items() if each.unserved}


class Prospects(Frozen):
    """Who can take a queued job: `unserved` says why no live worker can; otherwise `able` can, one of those alike."""

    unserved: Unserved | None
    able: tuple[WorkerView, ...] = ()


def look(session: Session, job_ids: Sequence[str], lease_s: float) -> dict[str, Prospects]:
    """The prospects of each of these jobs that is queued, by its id, with the workers seen within `lease_s`."""
    queued = select(Job).where(Job.id.in_(job_ids), Job.state == JobState.QUEUED)
    found: dict[str, Prospects] = {}
    waiting: dict[str, Job] = {}
    for job in session.scalars(queued):
        if job.via is None:
            waiting[job.id] = job
            continue
        # The machines of a scheduler are not known before it allocates one.
        problem = launches.problem_of(session, job.via)
        unserved = Unserved(want=Want.LAUNCHER, name=job.via.value, sentence=problem) if problem else None
        found[job.id] = Prospects(unserved=unserved)
    alive = workers.alive(session, lease_s) if waiting else ()
    unlike = {worker.model_dump_json(include=CAPABILITIES): worker for worker in alive}.values()
    lacking = [(worker, _lacking(session, waiting, worker)) for worker in unlike]
    for job in waiting.values():
        lacks = [(worker, needs[job.id]) for worker, needs in lacking]
        able = tuple(worker for worker, needs in lacks if not needs)
        found[job.id] = Prospects(unserved=None if able else _unserved(job, lacks), able=able)
    return found


def _lacking(session: Session, waiting: Mapping[str, Job], worker: WorkerView) -> dict[str, set[Need]]:
    """What the worker lacks for each of the jobs."""
    found: dict[str, set[Need]] = {job_id: set() for job_id in waiting}
    fits = device_fits(worker)
    for job_id, *answers in session.execute(select(Job.id, *fits.values()).where(Job.id.in_(list(waiting)))):
        job = waiting[job_id]
        asked = {
            Want.DEVICE: job.device.value,
            Want.GPU: str(job.spec.get("target", {}).get("gpu")),
            Want.MEMORY: str(job.min_vram_bytes),
        }
        unfit = [want for want, fit in zip(fits, answers, strict=True) if not fit]
        found[job_id] |= {Need(kind=want, name=asked[want]) for want in unfit}
    of_needs = select(JobNeed).where(JobNeed.job_id.in_(list(waiting)), not_(has(worker)))
    for need in session.scalars(of_needs):
        found[need.job_id].add(Need(kind=need.kind, name=need.name))
    return found


def _unserved(job: Job, lacking: Sequence[Lacking]) -> Unserved:
    if not lacking:
        sentence = (
            f"No worker is alive. Start one with `python -m worker --device {job.device}`; one that the service starts "
            "by itself takes some seconds."
        )
        return Unserved(want=Want.WORKER, name=None, sentence=sentence)
    need, nearest = _obstacle(lacking)
    says = f"{_who(need, job.device, lacking, nearest)} {_lacks(need)}"
    offered = sorted({name for worker in nearest for name in _offered_by(worker, need)})
    more = f" and {len(offered) - MOST_NAMES} more" if len(offered) > MOST_NAMES else ""
    listed = ", ".join(offered[:MOST_NAMES]) or "none"
    sentence = f"{says}; there are: {listed}{more}. {need.next_step}"
    return Unserved(want=need.kind, name=need.name, sentence=sentence)


def _obstacle(lacking: Sequence[Lacking]) -> tuple[Need, list[WorkerView]]:
    """What rules the last workers out, one need after the other, and those workers; each lacks something."""
    order = list(Want)
    needs = {need for _, lacks in lacking for need in lacks}
    left = list(lacking)
    for need in sorted(needs, key=lambda need: (order.index(need.kind), need.name)):
        having = [(worker, lacks) for worker, lacks in left if need not in lacks]
        if not having:
            return need, [worker for worker, _ in left]
        left = having
    raise AssertionError("A worker lacks nothing.")


def _who(need: Need, device: DeviceKind, lacking: Sequence[Lacking], nearest: Sequence[WorkerView]) -> str:
    """Of which live workers the sentence speaks: others may have what these lack, and lack something else."""
    if need.kind in (Want.DEVICE, Want.GPU) or len(nearest) == len(lacking):
        return "No live worker"
    of_device = [worker for worker, _ in lacking if worker.device is device]
    otherwise = " that fits the job otherwise" if len(nearest) < len(of_device) else ""
    return f"No live worker on {device}{otherwise}"


def _lacks(need: Need) -> str:
    match need.kind:
        case Want.DEVICE:
            return f"measures on {need.name}"
        case Want.GPU:
            return f"has a GPU named {need.name}"
        case Want.MEMORY:
            return f"has a GPU with {_gigabytes(int(need.name))} of memory"
        case Want.MODEL if need.name.startswith(FOLDER):
            return f"has {need.name} in its OPTIGPU_MODELS_DIR"
        case Want.MODEL:
            return f"holds {need.name}, and none may download it"
        case _:
            return f"has the {need.kind} {need.name}"


def _offered_by(worker: WorkerView, need: Need) -> Iterable[str]:
    """What the worker has of the kind that is asked for."""
    match need.kind:
        case Want.DEVICE:
            return (f"{worker.device} ({worker.hardware_class})",)
        case Want.GPU:
            return worker.gpus
        case Want.MEMORY:
            return (f"{name} with {_gigabytes(worker.vram_bytes or 0)}" for name in worker.gpus)
        case Want.BACKEND:
            return worker.backends
        case Want.PACKAGE:
            return worker.packages
        case _:
            kind = FOLDER if need.name.startswith(FOLDER) else HUB
            return (model for model in worker.models if model.startswith(kind))


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


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


def find_answer(session: Session, spec: JobSpec, prospects: Prospects) -> Answer | None:
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


def enter_answer(session: Session, job: Job, answer: Answer, at: datetime) -> None:
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
