"""The workers and what they can run."""

from fastapi import APIRouter

from api.auth import Reader
from api.openapi import GUARDED
from api.service import ServiceDep
from optigpu.documents.views import WorkerView
from optigpu.store import workers
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1", tags=["workers"], responses=GUARDED)


class Workers(Frozen):
    """Every worker that has not left."""

    workers: tuple[WorkerView, ...]


@router.get("/workers", operation_id="list_workers", summary="List workers")
def list_workers(service: ServiceDep, _: Reader) -> Workers:
    """What each worker can run, and whether it was heard of within its lease."""
    with service.database.read() as session:
        return Workers(workers=tuple(workers.list_(session, lease_s=service.settings.lease_s)))
