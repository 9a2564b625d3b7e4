"""Why no live worker can take a queued job, in a sentence for the person who posted it, found out whenever a job is
read."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from sqlalchemy import not_, select
from sqlalchemy.orm import Session

from optigpu.documents.views import Unserved, Want, WorkerView
from optigpu.job.needs import FOLDER, HUB, Need
from optigpu.store import launches, workers
from optigpu.store.queue import device_fits, has
from optigpu.store.tables import Job, JobNeed
from optigpu.vocabulary import DeviceKind, Frozen, JobState

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
