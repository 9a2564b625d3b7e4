"""Which worker can take which job: one rule, for the claim of a job and for the reason why nobody claims it."""

from sqlalchemy import ColumnElement, and_, literal, not_, or_, select

from optigpu.documents.views import Want, WorkerView
from optigpu.job.needs import HUB
from optigpu.store.tables import Job, JobNeed
from optigpu.store.workers import WorkerInfo

Capable = WorkerInfo | WorkerView
"""What a worker can run, as it says itself or as it is stored."""


def can_run(worker: Capable) -> tuple[ColumnElement[bool], ...]:
    """Conditions on a job's row that hold if the worker can take the job: not one that a scheduler's pilot takes."""
    return (Job.via.is_(None), *suits(worker))


def suits(worker: Capable) -> tuple[ColumnElement[bool], ...]:
    """Conditions on a job's row that hold if the worker's machine has what the job asks for."""
    lacking = select(JobNeed.name).where(JobNeed.job_id == Job.id, not_(has(worker)))
    return (*device_fits(worker).values(), not_(lacking.correlate(Job).exists()))


def device_fits(worker: Capable) -> dict[Want, ColumnElement[bool]]:
    """Conditions on a job's row, each of which holds if the worker's device is in one respect as the job asks for."""
    names = [literal(name.lower()).like(Job.gpu_pattern, escape="\\") for name in worker.gpus]
    return {
        Want.DEVICE: Job.device == worker.device,
        Want.GPU: or_(Job.gpu_pattern.is_(None), *names),
        Want.MEMORY: Job.min_vram_bytes <= (worker.vram_bytes or 0),
    }


def has(worker: Capable) -> ColumnElement[bool]:
    """The condition on a row of a job's needs that holds if the worker has it."""
    offered = {
        Want.BACKEND: worker.backends,
        Want.PACKAGE: worker.packages,
        Want.MODEL: worker.models,
    }
    held = [and_(JobNeed.kind == kind, JobNeed.name.in_(names)) for kind, names in offered.items()]
    if worker.downloads:
        held.append(and_(JobNeed.kind == Want.MODEL, JobNeed.name.like(f"{HUB}%")))
    return or_(*held)
