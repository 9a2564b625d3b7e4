"""The leaderboard, as JSON, CSV or Markdown."""

from collections.abc import Callable, Coroutine
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Annotated
from urllib.parse import quote_plus, urlencode

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import Field
from pydantic_core import to_json

from api.auth import Reader, caller, require
from api.filters import check_filters
from api.forms import PAGE, Form, accepted, next_cursor, query_word, written
from api.inputs import parameters_of
from api.openapi import GUARDED
from api.service import ServiceDep, service_of
from optigpu.documents.queries import LeaderboardQuery
from optigpu.documents.views import LeaderboardPage
from optigpu.report.leaderboard import leaderboard_csv, leaderboard_grids
from optigpu.store import leaderboard
from optigpu.store.keys import Scope
from optigpu.vocabulary import METRICS, Document


@lru_cache(maxsize=1)
def _few_at_a_time() -> CapacityLimiter:
    """Python runs one thread at a time: more that read pages would keep each other, and the event loop, waiting."""
    return CapacityLimiter(2)


class PageRoute(APIRoute):
    """The call as its function documents it; what it is given is read here, because FastAPI takes as long for it as the
    page itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        """FastAPI's hook for what answers a request."""
        return _answer


async def _answer(request: Request) -> Response:
    wanted = parameters_of(request, LeaderboardFilter)
    service = await service_of(request)
    who = await caller(request, service, None)
    require(who, Scope.READ)
    return await to_thread.run_sync(get_leaderboard, request, service, who, wanted, limiter=_few_at_a_time())


router = APIRouter(prefix="/v1", tags=["leaderboard"], responses=GUARDED, route_class=PageRoute)
MetricName = StrEnum("MetricName", {name: name for name in METRICS})  # type: ignore[misc]


class LeaderboardFilter(LeaderboardQuery):
    """Which boards and rows to list, and in which form."""

    metric: Annotated[
        MetricName | None, Field(description=LeaderboardQuery.model_fields["metric"].description)
    ] = None
    format: Annotated[Form | None, Field(description="Takes precedence over the header Accept.")] = None

    def link(self, prefix: str, **changes: str) -> str:
        """The address of another page with these filters."""
        words = self._words | {name: f"{name}={quote_plus(value)}" for name, value in changes.items()}
        return f"{prefix}/v1/leaderboard?{'&'.join(words.values())}"

    @cached_property
    def _words(self) -> dict[str, str]:
        """The filters as they are written in an address: a page has a link or two for each of its boards."""
        given = self.model_dump(mode="json", exclude_unset=True, exclude={"cursor"})
        return {name: urlencode({name: query_word(value)}) for name, value in given.items()}

    def links(self, board: Document, prefix: str) -> dict[str, str]:
        """The addresses of all rows of a board, and of its next page: one of several boards shows its first rows."""
        digest, cursor = board["workload_digest"], board["next_cursor"]
        links = {"self": self.link(prefix, workload=digest)}
        return links | {"next": self.link(prefix, workload=digest, cursor=cursor)} if cursor else links


@router.get(
    "/leaderboard",
    operation_id="get_leaderboard",
    summary="Read the leaderboard",
    response_model=LeaderboardPage,
    responses={200: PAGE},
)
def get_leaderboard(
    request: Request, service: ServiceDep, _: Reader, wanted: Annotated[LeaderboardFilter, Query()]
) -> Response:
    """Boards of comparable results, the one with the newest result first; each row is the current result of a variant
    on a class of hardware.

    A board is one workload with its shapes and its model; rows are ranked within it, and rows whose intervals overlap
    share a rank. Several boards show their first rows: `links.self` of a board leads to all of them.
    """
    prefix = service.settings.prefix
    # A page that changes meanwhile is kept as of the revision before.
    with service.database.glance() as connection:
        page = leaderboard.read(connection, wanted)
    if not page["boards"]:  # a filter that has found something is known
        with service.database.read() as session:
            check_filters(session, wanted)
    for board in page["boards"]:
        board["links"] = wanted.links(board, prefix)
    form = wanted.format or accepted(request.headers.get("accept", ""))
    if form is Form.JSON:
        response = Response(to_json(page), media_type="application/json")
    else:
        response = written(LeaderboardPage.model_validate(page), form, leaderboard_csv, leaderboard_grids)
    response.headers["Vary"] = "Accept"
    of_boards = [board["next_cursor"] for board in page["boards"]]
    if cursor := next_cursor(of_boards, page["next_cursor"], wanted.cursor):
        response.headers["Link"] = f'<{wanted.link(prefix, cursor=cursor)}>; rel="next"'
    return response
