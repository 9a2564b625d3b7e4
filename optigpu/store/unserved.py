"""Why no live worker can take a queued job, in a sentence for the person who posted it, found out whenever a job is
read."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from sqlalchemy import not_, select
from sqlalchemy.orm import Session

from optigpu.documents.views import Unserved, Want, WorkerView
from optigpu.job.needs import FOLDER, HUB, Need
from optigpu.store import launches, workers
from optigpu.store.matching import device_fits, has
from optigpu.store.tables import Job, JobNeed
from optigpu.vocabulary import DeviceKind, Frozen, JobState, Scheduler

MOST_NAMES = 8
"""How many names a sentence lists."""
CAPABILITIES = {
    "device",
    "hardware_class",
    "gpus",
    "vram_bytes",
    "backends",
    "packages",
    "models",
    "downloads",
    "software",
}

Lacking = tuple[WorkerView, AbstractSet[Need]]
"""A worker, and what it lacks for one job."""


def reasons(session: Session, job_ids: Sequence[str], lease_s: float) -> dict[str, Unserved]:
    """By its id why each of these jobs waits, if it is queued and no worker seen within `lease_s` can take it."""
    return {
        job_id: found.unserved for job_id, found in look(session, job_ids, lease_s).items() if found.unserved
    }


class Prospects(Frozen):
    """Who can take a queued job: `unserved` says why no live worker can; otherwise `able` can, one of those alike."""

    unserved: Unserved | None
    able: tuple[WorkerView, ...] = ()


def look(session: Session, job_ids: Sequence[str], lease_s: float) -> dict[str, Prospects]:
    """The prospects of each of these jobs that is queued, by its id, with the workers seen within `lease_s`."""
    queued = select(Job).where(Job.id.in_(job_ids), Job.state == JobState.QUEUED)
    found = session.scalars(queued).all()
    via = {job.id: _via(session, job.via) for job in found if job.via is not None}
    waiting = {job.id: job for job in found if job.via is None}
    if not waiting:
        return via
    lacking = [
        (worker, _lacking(session, waiting, worker)) for worker in _unlike(workers.alive(session, lease_s))
    ]
    return via | {
        job.id: _prospects(job, [(worker, lacks[job.id]) for worker, lacks in lacking])
        for job in waiting.values()
    }


def _via(session: Session, scheduler: Scheduler) -> Prospects:
    """Those of a job for a scheduler, whose machines are not known before it allocates one."""
    problem = launches.problem_of(session, scheduler)
    unserved = Unserved(want=Want.LAUNCHER, name=scheduler.value, sentence=problem) if problem else None
    return Prospects(unserved=unserved)


def _prospects(job: Job, lacking: Sequence[Lacking]) -> Prospects:
    able = tuple(worker for worker, lacks in lacking if not lacks)
    return Prospects(unserved=None if able else _unserved(job, lacking), able=able)


def _unlike(alive: Iterable[WorkerView]) -> list[WorkerView]:
    """One of those workers that can run the same."""
    return list({worker.model_dump_json(include=CAPABILITIES): worker for worker in alive}.values())


def _lacking(session: Session, waiting: Mapping[str, Job], worker: WorkerView) -> dict[str, set[Need]]:
    """What the worker lacks for each of the jobs."""
    found: dict[str, set[Need]] = {job_id: set() for job_id in waiting}
    fits = device_fits(worker)
    for job_id, *answers in session.execute(select(Job.id, *fits.values()).where(Job.id.in_(list(waiting)))):
        found[job_id] |= {
            _asked(waiting[job_id], want) for want, fit in zip(fits, answers, strict=True) if not fit
        }
    of_needs = select(JobNeed).where(JobNeed.job_id.in_(list(waiting)), not_(has(worker)))
    for need in session.scalars(of_needs):
        found[need.job_id].add(Need(kind=need.kind, name=need.name))
    return found


def _asked(job: Job, want: Want) -> Need:
    """What the job asks for of a device."""
    names = {
        Want.DEVICE: job.device.value,
        Want.GPU: str(job.spec.get("target", {}).get("gpu")),
        Want.MEMORY: str(job.min_vram_bytes),
    }
    return Need(kind=want, name=names[want])


def _unserved(job: Job, lacking: Sequence[Lacking]) -> Unserved:
    if not lacking:
        sentence = (
            f"No worker is alive. Start one with `python -m worker --device {job.device}`; one that the service starts "
            "by itself takes some seconds."
        )
        return Unserved(want=Want.WORKER, name=None, sentence=sentence)
    need, nearest = _obstacle(lacking)
    says = f"{_who(need, job.device, lacking, nearest)} {_lacks(need)}"
    sentence = f"{says}; there are: {_listed(_offered(need, nearest))}. {need.next_step}"
    return Unserved(want=need.kind, name=need.name, sentence=sentence)


def _obstacle(lacking: Sequence[Lacking]) -> tuple[Need, list[WorkerView]]:
    """What rules the last workers out, one need after the other, and those workers; each lacks something."""
    order = list(Want)
    needs = iter(
        sorted(
            {need for _, lacks in lacking for need in lacks},
            key=lambda need: (order.index(need.kind), need.name),
        )
    )
    left = list(lacking)
    while True:
        need = next(needs)
        having = [(worker, lacks) for worker, lacks in left if need not in lacks]
        if not having:
            return need, [worker for worker, _ in left]
        left = having


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


def _offered(need: Need, nearest: Iterable[WorkerView]) -> list[str]:
    """What these workers have of the kind that is asked for."""
    return [name for worker in nearest for name in _offered_by(worker, need)]


def _offered_by(worker: WorkerView, need: Need) -> Iterable[str]:
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


def _listed(names: Iterable[str]) -> str:
    unique = sorted(set(names))
    more = len(unique) - MOST_NAMES
    shown = ", ".join(unique[:MOST_NAMES])
    return (f"{shown} and {more} more" if more > 0 else shown) or "none"


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
