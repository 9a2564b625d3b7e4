"""The workers: what they can run, when they were last seen, and where they are notified: the broker's address, the task
and the queues. A message only names a job: one that is lost, late or repeated changes nothing."""

from datetime import datetime, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from optigpu.documents.selftest import SelfTestSummary
from optigpu.documents.views import WorkerFacts, WorkerView
from optigpu.store.database import moment
from optigpu.store.statements import insert_into
from optigpu.store.tables import KnownName, Worker
from optigpu.vocabulary import DeviceKind

LEASE_S = 30.0
FORGOTTEN_AFTER = timedelta(days=7)


class WorkerInfo(WorkerFacts):
    """A worker's description of itself, as in WorkerView. `gpu_uuid` is the GPU that its jobs run on; null on a CPU."""

    gpu_uuid: str | None = None

    @property
    def measures_on(self) -> str:
        """The one device that its jobs run on: the GPU's UUID, or on a CPU the hardware class with its cores."""
        return self.gpu_uuid or self.hardware_class


def register(session: Session, worker: WorkerInfo, now: datetime | None = None) -> None:
    """Enters or updates a worker; removes those that were not seen for a week."""
    at = moment(session, now)
    session.execute(delete(Worker).where(Worker.seen_at < at - FORGOTTEN_AFTER))
    plain = worker.model_dump(mode="json", exclude={"id", "gpu_uuid"})
    changes = plain | {"device": worker.device, "started_at": at, "seen_at": at, "job_id": None}
    insert = insert_into(session, Worker).values(id=worker.id, **changes)
    session.execute(insert.on_conflict_do_update(index_elements=["id"], set_=changes))


def note_models(session: Session, worker: WorkerInfo) -> None:
    """Which models the worker has now."""
    changes = {"models": list(worker.models), "downloads": worker.downloads}
    session.execute(update(Worker).where(Worker.id == worker.id).values(changes))


def seen(session: Session, worker_id: str, job_id: str | None = None, now: datetime | None = None) -> None:
    """The worker is alive, and busy with that job or idle."""
    at = moment(session, now)
    session.execute(update(Worker).where(Worker.id == worker_id).values(seen_at=at, job_id=job_id))


def leave(session: Session, worker_id: str) -> None:
    """Removes a worker that has stopped."""
    session.execute(delete(Worker).where(Worker.id == worker_id))


def list_(session: Session, *, lease_s: float = LEASE_S, now: datetime | None = None) -> list[WorkerView]:
    """Every worker that has not left, by host; `alive` means seen within `lease_s` seconds."""
    heard_since = moment(session, now) - timedelta(seconds=lease_s)
    rows = session.scalars(select(Worker).order_by(Worker.host_id, Worker.device, Worker.id))
    return [
        row.as_view(
            WorkerView,
            selftest=row.selftest and SelfTestSummary.model_validate(row.selftest, extra="ignore"),
            alive=row.seen_at >= heard_since,
        )
        for row in rows
    ]


def alive(session: Session, lease_s: float = LEASE_S) -> list[WorkerView]:
    """The workers that were seen within `lease_s` seconds."""
    return [worker for worker in list_(session, lease_s=lease_s) if worker.alive]


def hardware_classes(session: Session) -> list[str]:
    """Every class of hardware that serves or has had results, sorted."""
    serving = session.scalars(select(Worker.hardware_class).distinct())
    ranked = session.scalars(select(KnownName.name).where(KnownName.filter == "hardware"))
    return sorted({*serving, *ranked})


LOOK_TASK = "optigpu.look"
"""The name of the Celery task; its one argument is a job's id."""


def message(job_id: str, device: DeviceKind) -> dict[str, object]:
    """What Celery's `send_task` is given for a job that was posted: Celery's own tools show it by the job's id."""
    return {"name": LOOK_TASK, "args": (job_id,), "task_id": job_id, "queue": queue_for(device)}


def repeated(job_id: str, device: DeviceKind) -> dict[str, object]:
    """The same for a job whose message may be lost, with an id of its own: workers ignore one that was revoked."""
    return {"name": LOOK_TASK, "args": (job_id,), "queue": queue_for(device)}


def queue_for(device: DeviceKind) -> str:
    """The queue that workers of this kind of device listen to."""
    return f"optigpu.{device.value}"


def broker_url(redis_url: str) -> str:
    """The address for Celery, which checks no certificate of a `rediss://` address unless the address asks for it."""
    if not redis_url.startswith("rediss://") or "ssl_cert_reqs=" in redis_url:
        return redis_url
    return f"{redis_url}{'&' if '?' in redis_url else '?'}ssl_cert_reqs=required"
