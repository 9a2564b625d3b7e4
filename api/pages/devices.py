"""The page at `/devices`: the edge leaderboard, and each device with its last report."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api import edge_boards
from api.edge_boards import EdgeQuery
from api.edge_tables import edge_grids
from api.inputs import Cursor
from api.pages.view import Asked, ReaderView
from optigpu.documents.devices import DeviceReportView, DeviceView
from optigpu.documents.edge import EdgeMetric
from optigpu.hardware.boards import boards as catalog
from optigpu.store import devices, edge_reports
from optigpu.store.database import Session

router = APIRouter()
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
        "devices.html",
        asked=asked,
        metrics=[metric.value for metric in EdgeMetric],
        devices=shown,
        next_cursor=page.next_cursor,
        grids=edge_grids(boards) if boards.boards else (),
    )


def _last(session: Session, device: DeviceView) -> DeviceReportView | None:
    reports = edge_reports.list_reports(session, device.id, limit=1).reports
    return reports[0] if reports else None
