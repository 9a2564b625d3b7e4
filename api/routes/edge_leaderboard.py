"""The edge leaderboard, as JSON, CSV or Markdown."""

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from api import edge_boards
from api.auth import Reader
from api.edge_boards import HEAD_ROWS, ROWS, EdgeQuery
from api.forms import PAGE, Form, accepted, next_cursor, query_word, written
from api.inputs import Cursor, Limit
from api.openapi import GUARDED
from api.problems import ProblemError, summary
from api.service import ServiceDep
from optigpu.documents.devices import LIFETIME_YEARS, EdgeBoard, EdgeMetric, EdgePage, InputSource, RunnerName
from optigpu.documents.fields import Entry, unknown
from optigpu.documents.queries import Text
from optigpu.hardware.boards import boards as catalog
from optigpu.store import edge_reports
from optigpu.store.database import Session
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1", tags=["leaderboard"], responses=GUARDED)


class EdgeFilter(Frozen):
    """Which boards and rows to list; see EdgeQuery for what each filter means."""

    metric: Annotated[EdgeMetric, Query(description="What devices are ranked by.")] = EdgeMetric.LATENCY
    model: Annotated[
        Text | None, Query(description="The SHA-256 of a model's file, or the beginning of it.")
    ] = None
    board: Annotated[Text | None, Query(description="A board by its name in the catalog.")] = None
    input: Annotated[InputSource | None, Query(description="Where the inputs came from.")] = None
    runner: Annotated[RunnerName | None, Query(description="What ran the model.")] = None
    include_unranked: Annotated[
        bool,
        Query(
            description="Add simulators, quarantined reports and all else that does not rank, with the reasons."
        ),
    ] = False
    price: Annotated[
        Annotated[float, Field(gt=0, le=1e9)] | None,
        Query(description="The price of a device in US dollars. Default: the catalog's, of each board."),
    ] = None
    price_per_kwh: Annotated[
        Annotated[float, Field(ge=0, le=1e6)] | None,
        Query(description="The price of a kilowatt-hour in US dollars. Default: costs are without energy."),
    ] = None
    lifetime_years: Annotated[
        float,
        Query(
            ge=0.01,
            le=100,
            description="For how many years of nothing but inferences the price of a device is spread.",
        ),
    ] = LIFETIME_YEARS
    limit: Annotated[
        Limit | None,
        Query(
            description=f"The largest number of rows of a board. Default: {ROWS}; {HEAD_ROWS} for several boards."
        ),
    ] = None
    cursor: Cursor | None = None
    format: Annotated[Form | None, Query(description="Takes precedence over the header Accept.")] = None

    def query(self) -> EdgeQuery:
        """The same, as the store asks for it, with the prices of the catalog."""
        prices = {board.id: board.price_usd for board in catalog() if board.price_usd is not None}
        return EdgeQuery(**self.model_dump(exclude={"format"}), prices=prices)

    def link(self, prefix: str, **changes: str) -> str:
        """The address of another page with these filters."""
        given = self.model_dump(mode="json", exclude_unset=True, exclude={"cursor"}) | changes
        words = {name: query_word(value) for name, value in given.items()}
        return f"{prefix}/v1/edge/leaderboard?{urlencode(words)}"


@router.get(
    "/edge/leaderboard",
    operation_id="get_edge_leaderboard",
    summary="Read the leaderboard of edge devices",
    response_model=EdgePage,
    responses={200: PAGE},
)
def get_edge_leaderboard(
    request: Request, service: ServiceDep, _: Reader, wanted: Annotated[EdgeFilter, Query()]
) -> Response:
    """Boards of comparable devices, the one with the newest report first; each row is a device.

    A board is one model's file, one source of inputs and one runner. Devices are ranked within it, and those whose
    spreads over the windows of their run overlap share a rank. Beside them stand the results of workers that ran the
    same network, by energy per inference; they are not ranked with devices.
    """
    query, prefix = wanted.query(), service.settings.prefix
    with service.database.read() as session:
        _check(session, query)
        page = _linked(edge_boards.query(session, query), wanted, prefix)
    response = _written(page, wanted.format or accepted(request.headers.get("accept", "")))
    response.headers["Vary"] = "Accept"
    of_boards = [board.next_cursor for board in page.boards]
    if cursor := next_cursor(of_boards, page.next_cursor, wanted.cursor):
        response.headers["Link"] = f'<{wanted.link(prefix, cursor=cursor)}>; rel="next"'
    return response


def _check(session: Session, query: EdgeQuery) -> None:
    """Raises ProblemError 422 that names each filter that fits nothing known, with what is known."""
    entries: list[Entry] = []
    if query.model is not None:
        known = edge_reports.models_of_reports(session)
        if not any(name.startswith(query.model.lower()) for name in known):
            entries.append(unknown(["model"], "model", query.model, known))
    if query.board is not None:
        names = {*edge_reports.boards_of_reports(session), *(board.id for board in catalog())}
        if query.board not in names:
            entries.append(unknown(["board"], "board", query.board, names))
    if entries:
        raise ProblemError(422, summary(entries), entries)


def _linked(page: EdgePage, wanted: EdgeFilter, prefix: str) -> EdgePage:
    """The page with a link from each board to all of its rows; one of several shows only the first."""
    linked = tuple(board.model_copy(update={"links": _links(board, wanted, prefix)}) for board in page.boards)
    return page.model_copy(update={"boards": linked})


def _links(board: EdgeBoard, wanted: EdgeFilter, prefix: str) -> dict[str, str]:
    partition = {
        "model": board.model_sha256,
        "input": board.input_source.value,
        "runner": board.runner.value,
    }
    links = {"self": wanted.link(prefix, **partition)}
    if board.next_cursor:
        links["next"] = wanted.link(prefix, **partition, cursor=board.next_cursor)
    return links


def _written(page: EdgePage, form: Form) -> Response:
    from api.edge_tables import edge_csv, edge_grids

    return written(page, form, edge_csv, edge_grids)
