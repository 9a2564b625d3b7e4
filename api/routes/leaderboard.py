"""The leaderboard, as JSON, CSV or Markdown."""

from collections.abc import Callable, Coroutine
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute

from api.auth import Reader, caller, require
from api.forms import PAGE, accepted
from api.new_pages import LeaderboardFilter, WantedPage
from api.openapi import GUARDED
from api.parameters import parameters_of
from api.service import ServiceDep, service_of
from optigpu.documents.views import LeaderboardPage
from optigpu.store.keys import Scope


async def _answer(request: Request) -> Response:
    wanted = parameters_of(request, LeaderboardFilter)
    service = await service_of(request)
    who = await caller(request, service, None)
    require(who, Scope.READ)
    return await get_leaderboard(request, service, who, wanted)


class PageRoute(APIRoute):
    """The call as its function documents it; what it is given is read here, because FastAPI takes long for it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        """FastAPI's hook for what answers a request."""
        return _answer


router = APIRouter(prefix="/v1", tags=["leaderboard"], responses=GUARDED, route_class=PageRoute)


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
