"""The pages at `/hardware` and `/workers`: which hardware there is, who serves it, and whether it is alive."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.pages.view import Asked, Plain, ReaderView
from api.routes.hardware import catalog_of
from optigpu.documents.queries import Text
from optigpu.hardware.catalog import HardwareKind
from optigpu.store import queue, workers
from optigpu.vocabulary import JobState

router = APIRouter()


class HardwareAsked(Asked):
    """Which devices of the catalog."""

    kind: HardwareKind | None = None
    name: Annotated[Text | None, Query(description="Part of a name.")] = None


@router.get("/hardware")
def read_hardware(view: ReaderView, asked: Annotated[HardwareAsked, Query()]) -> Response:
    """Classes with a worker or a result, and the catalog of published peaks."""
    with view.service.database.read() as session:
        classes = workers.hardware_classes(session)
        serving = workers.list_(session, lease_s=view.service.settings.lease_s)
    part = (asked.name or "").lower()
    catalog = [
        entry
        for entry in catalog_of(worker for worker in serving if worker.alive)
        if asked.kind in (None, entry.kind) and part in entry.name.lower()
    ]
    return view.page(
        "hardware.html",
        asked=asked,
        kinds=[kind.value for kind in HardwareKind],
        classes=[(name, [each for each in serving if each.hardware_class == name]) for name in classes],
        catalog=catalog,
    )


@router.get("/workers")
def read_workers(view: ReaderView, _: Plain) -> Response:
    """Those that have not left, those that were heard of within their lease first; and the queue."""
    with view.service.database.read() as session:
        found = workers.list_(session, lease_s=view.service.settings.lease_s)
        counts = queue.counts(session)
    found = sorted(found, key=lambda worker: (not worker.alive, worker.id))
    waits = counts[JobState.QUEUED]
    return view.page("workers.html", workers=found, counts=counts, waits=waits)
