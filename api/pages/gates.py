"""The page at `/gates`: what gates found, series by series, the newest first."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.inputs import Cursor
from api.pages.view import Asked, ReaderView
from optigpu.documents.gates import Series
from optigpu.store import gates

router = APIRouter()
ROWS = 200


class GatesAsked(Asked):
    """Of which series."""

    series: Series | None = None
    cursor: Cursor | None = None


@router.get("/gates")
def read_gates(view: ReaderView, asked: Annotated[GatesAsked, Query()]) -> Response:
    """Without a series, the newest of all, each beside the others of its series."""
    with view.service.database.read() as session:
        page = gates.list_(session, series=asked.series, limit=ROWS, cursor=asked.cursor)
    groups = {each.series: [one for one in page.gates if one.series == each.series] for each in page.gates}
    return view.page("gates.html", groups=groups, asked=asked, next_cursor=page.next_cursor)
