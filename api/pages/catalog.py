"""The pages of what there is: `/techniques`, with what each does, what it bought where it was measured, its citation
and its conflicts; `/hardware` and `/workers`, with who serves it and whether it is alive; and `/devices`, the edge
leaderboard, and each device with its last report."""

from collections import defaultdict
from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api import edge_boards
from api.edge_boards import EdgeQuery
from api.inputs import Cursor
from api.pages.figures import FigureText
from api.pages.view import Asked, Plain, ReaderView
from api.routes.edge_leaderboard import edge_grids
from api.routes.operations import catalog_of
from optigpu.documents.devices import DeviceReportView, DeviceView, EdgeMetric
from optigpu.documents.queries import Text
from optigpu.hardware.catalog import HardwareKind
from optigpu.hardware.catalog import boards as catalog
from optigpu.report.catalog import parameters_text, technique_fact
from optigpu.report.formats import ratio
from optigpu.store import devices, edge_reports, filters, queue, tallies, workers
from optigpu.store.database import Session
from optigpu.store.tallies import MeasuredGain
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import JobState, Layer

router = APIRouter()
SHOWN_GAINS = 6

LayerName = StrEnum("LayerName", {layer.value: layer.value for layer in Layer})  # type: ignore[misc]


class TechniquesAsked(Asked):
    """Which of them."""

    layer: Annotated[LayerName | None, Query(description="A layer of the stack.")] = None
    measured: Annotated[bool, Query(description="Only those that were measured here.")] = False


@router.get("/techniques")
def read_techniques(view: ReaderView, asked: Annotated[TechniquesAsked, Query()]) -> Response:
    """By layer."""
    with view.service.database.read() as session:
        found = tallies.alone(session)
        known = filters.names(session, "technique")
    here: dict[str, list[MeasuredGain]] = defaultdict(list)
    for gain in found:
        here[gain.technique].append(gain)
    facts = [technique_fact(kind) for kind in TECHNIQUES.values()]
    shown = [
        (fact, parameters_text(fact), [(gain, _gain_text(gain)) for gain in here[fact["name"]][:SHOWN_GAINS]])
        for fact in facts
        if asked.layer in (None, fact["layer"]) and (here[fact["name"]] or not asked.measured)
    ]
    return view.page(
        "catalog.html#techniques",
        asked=asked,
        techniques=shown,
        known=known,
        layers=list(LayerName),
        every=len(facts),
    )


def _gain_text(gain: MeasuredGain) -> FigureText:
    text, _, spread = ratio(gain.gain).partition(" ")
    return FigureText(text, spread)


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
        "catalog.html#hardware",
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
    return view.page("catalog.html#workers", workers=found, counts=counts, waits=waits)


SHOWN = 25


class DevicesAsked(Asked):
    """By what devices are ranked, and which page of the list."""

    metric: Annotated[EdgeMetric, Query(description="What devices are ranked by.")] = EdgeMetric.LATENCY
    cursor: Cursor | None = None


@router.get("/devices")
def read_devices(view: ReaderView, asked: Annotated[DevicesAsked, Query()]) -> Response:
    """The newest devices first; those that were revoked stay in the list."""
    prices = {board.id: board.price_usd for board in catalog() if board.price_usd is not None}
    with view.service.database.read() as session:
        page = devices.list_(session, limit=SHOWN, cursor=asked.cursor)
        shown = [(device, _last(session, device)) for device in page.devices]
        boards = edge_boards.query(
            session, EdgeQuery(metric=asked.metric, prices=prices, include_unranked=True)
        )
    return view.page(
        "catalog.html#devices",
        asked=asked,
        metrics=[metric.value for metric in EdgeMetric],
        devices=shown,
        next_cursor=page.next_cursor,
        grids=edge_grids(boards) if boards.boards else (),
    )


def _last(session: Session, device: DeviceView) -> DeviceReportView | None:
    reports = edge_reports.list_reports(session, device.id, limit=1).reports
    return reports[0] if reports else None
