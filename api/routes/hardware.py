"""Hardware classes with a worker or a result, and the catalog of published peaks."""

from collections.abc import Iterable

from fastapi import APIRouter

from api.auth import Reader
from api.openapi import GUARDED
from api.service import ServiceDep
from optigpu.documents.views import WorkerView
from optigpu.hardware import catalog
from optigpu.store import workers
from optigpu.vocabulary import DeviceKind, Frozen

router = APIRouter(prefix="/v1", tags=["workers"], responses=GUARDED)


class CatalogEntry(catalog.Device):
    """A device with its published peaks, and the ids of the living workers that have one."""

    served_by: tuple[str, ...] = ()


class Hardware(Frozen):
    """Classes of hardware, by which the leaderboard can be filtered, and every device of the catalog."""

    hardware: tuple[str, ...]
    catalog: tuple[CatalogEntry, ...]


@router.get("/hardware", operation_id="list_hardware", summary="List hardware")
def list_hardware(service: ServiceDep, _: Reader) -> Hardware:
    """Hardware classes with a worker or a leaderboard row, and the catalog of peaks with the workers of each device."""
    with service.database.read() as session:
        classes = workers.hardware_classes(session)
        serving = workers.list_(session, lease_s=service.settings.lease_s)
    return Hardware(hardware=tuple(classes), catalog=catalog_of(worker for worker in serving if worker.alive))


def catalog_of(serving: Iterable[WorkerView]) -> tuple[CatalogEntry, ...]:
    """The catalog with those of these workers that have each device."""
    served: dict[str, list[str]] = {}
    for worker in serving:
        for name in dict.fromkeys(device.name for device in _devices(worker)):
            served.setdefault(name, []).append(worker.id)
    return tuple(
        CatalogEntry(**dict(device), served_by=tuple(served.get(device.name, ())))
        for device in catalog.devices()
    )


def _devices(worker: WorkerView) -> list[catalog.Device]:
    """The worker's devices that are in the catalog."""
    if worker.device is DeviceKind.CPU:
        found = [catalog.find_class(worker.hardware_class)]
    else:
        found = [catalog.find(name) for name in worker.gpus]
    return [device for device in found if device is not None]
