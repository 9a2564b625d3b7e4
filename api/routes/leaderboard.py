"""The leaderboard as JSON, CSV or Markdown, as the query or the header Accept asks for.

A filter that is unknown is refused with those that are known: what this version can measure, and what the database
holds results of.
"""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar
from urllib.parse import quote_plus, urlencode

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import Field
from pydantic_core import to_json

from api.auth import Reader, caller, require
from api.inputs import parameters_of
from api.openapi import GUARDED
from api.problems import ProblemError, summary
from api.service import ServiceDep, service_of
from optigpu.backends import BACKENDS
from optigpu.documents.devices import EdgePage
from optigpu.documents.fields import Entry, unknown
from optigpu.documents.queries import LeaderboardQuery
from optigpu.documents.views import LeaderboardPage
from optigpu.models.reference import BUNDLED, IMAGE_PRESETS, PRESETS
from optigpu.report.leaderboard import leaderboard_csv, leaderboard_grids
from optigpu.store import filters, leaderboard, workers
from optigpu.store.database import Session
from optigpu.store.keys import Scope
from optigpu.store.statements import newest_of
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import METRICS, Document
from optigpu.workloads import WORKLOADS

if TYPE_CHECKING:
    from optigpu.report.formats import Grid

Page = TypeVar("Page", LeaderboardPage, EdgePage)


class Form(StrEnum):
    """How the rows are written."""

    JSON = "json"
    CSV = "csv"
    MARKDOWN = "md"


MEDIA_TYPES = {
    "application/json": Form.JSON,
    "text/csv": Form.CSV,
    "text/markdown": Form.MARKDOWN,
}

PAGE: dict[str, object] = {
    "description": "Boards with their rows, best first. The header Link leads to the next page.",
    "content": {media_type: {"schema": {"type": "string"}} for media_type in ("text/csv", "text/markdown")},
    "headers": {"Link": {"description": "The next page.", "schema": {"type": "string"}}},
}
"""The documentation of a page of boards."""


def query_word(value: object) -> object:
    """A parameter of an address as it is written there."""
    return str(value).lower() if isinstance(value, bool) else value


def written(
    page: Page, form: Form, to_csv: Callable[[Page], str], to_grids: Callable[[Page], "Iterable[Grid]"]
) -> Response:
    """The page in this form."""
    from optigpu.report.formats import markdown

    match form:
        case Form.CSV:
            return Response(to_csv(page), media_type="text/csv")
        case Form.MARKDOWN:
            return Response("\n".join(map(markdown, to_grids(page))), media_type="text/markdown")
        case Form.JSON:
            return Response(page.model_dump_json(), media_type="application/json")


def next_cursor(of_boards: Sequence[str | None], of_list: str | None, cursor: str | None) -> str | None:
    """Of the boards that follow, or of the rows that follow where one board is read and not the end of a list."""
    return of_boards[0] if len(of_boards) == 1 and newest_of(cursor) is None else of_list


def accepted(accept: str) -> Form:
    """The form that a header Accept likes best; JSON when it names none of ours."""
    best, chosen = 0.0, Form.JSON
    for part in accept.split(","):
        media_type, *options = (piece.strip() for piece in part.split(";"))
        weight = _weight(options)
        if media_type.lower() in MEDIA_TYPES and weight > best:
            best, chosen = weight, MEDIA_TYPES[media_type.lower()]
    return chosen


def _weight(options: list[str]) -> float:
    for option in options:
        if option.startswith("q="):
            try:
                return float(option[2:])
            except ValueError:
                return 0.0
    return 1.0


MODELS = (
    *(f"preset:{name}" for name in PRESETS | IMAGE_PRESETS),
    *(f"bundled:{name}" for name in BUNDLED),
)
"""The models that have a name of their own; repositories and folders are known once they have results."""


class Names(NamedTuple):
    """The names that a filter can have: those of this version, those of stored results, and how they are compared."""

    ours: Iterable[str]
    stored: Callable[[Session], list[str]]
    fits: Callable[[str, str], bool] = str.__eq__


def _is_part(wanted: str, name: str) -> bool:
    return wanted.lower() in name.lower()


def _is_same(wanted: str, name: str) -> bool:
    return wanted.lower() == name


NAMES = {
    "workload": Names(WORKLOADS, partial(filters.names, filter_="workload")),
    "model": Names(MODELS, partial(filters.names, filter_="model")),
    "hardware": Names((), workers.hardware_classes, _is_part),
    "technique": Names(TECHNIQUES, partial(filters.names, filter_="technique"), _is_same),
    "backend": Names(BACKENDS, partial(filters.names, filter_="backend")),
    "source": Names(("worker",), partial(filters.names, filter_="source")),
}


def check_filters(session: Session, query: LeaderboardQuery) -> None:
    """Raises ProblemError 422 that names each filter that fits nothing known, with what is known, close names first."""
    checked = set(NAMES) - (
        {"model"} if query.others else set()
    )  # other tools give models names of their own
    given = query.model_dump(include=checked, exclude_none=True)
    entries = [entry for field, name in given.items() if (entry := _refusal(session, field, name))]
    if entries:
        raise ProblemError(422, summary(entries), entries)


def _refusal(session: Session, field: str, given: str) -> Entry | None:
    names = NAMES[field]
    if any(names.fits(given, name) for name in names.ours):
        return None
    if field == "workload" and filters.has_workload(session, given):
        return None
    known = {*names.ours, *names.stored(session)}
    if any(names.fits(given, name) for name in known):
        return None
    return unknown([field], field, given, known)


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
