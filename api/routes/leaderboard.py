"""The leaderboard, as JSON, CSV or Markdown."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.auth import Reader
from api.forms import PAGE, accepted
from api.new_pages import LeaderboardFilter, WantedPage
from api.openapi import GUARDED
from api.service import ServiceDep
from optigpu.documents.views import LeaderboardPage

router = APIRouter(prefix="/v1", tags=["leaderboard"], responses=GUARDED)


@router.get(
    "/leaderboard",
    operation_id="get_leaderboard",
    summary="Read the leaderboard",
    response_model=LeaderboardPage,
    responses={200: PAGE},
)
async def get_leaderboard(
    request: Request, service: ServiceDep, _: Reader, wanted: Annotated[LeaderboardFilter, Query()]
) -> Response:
    """Boards of comparable results, the one with the newest result first; each row is the current result of a variant
    on a class of hardware.

    A board is one workload with its shapes and its model; rows are ranked within it, and rows whose intervals overlap
    share a rank. Several boards show their first rows: `links.self` of a board leads to all of them.
    """
    form = wanted.format or accepted(request.headers.get("accept", ""))
    return await service.pages.ask(WantedPage(wanted, form))
