"""The edge leaderboard as JSON, as tables in Markdown, and as flat records in CSV."""

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from api import edge_boards
from api.auth import Reader
from api.edge_boards import HEAD_ROWS, ROWS, EdgeQuery
from api.inputs import Cursor, Limit
from api.openapi import GUARDED
from api.problems import ProblemError, summary
from api.routes.leaderboard import PAGE, Form, accepted, next_cursor, query_word, written
from api.service import ServiceDep
from optigpu.documents.devices import (
    LIFETIME_YEARS,
    CostAssumptions,
    DeviceSource,
    EdgeBoard,
    EdgeFigure,
    EdgeMetric,
    EdgePage,
    EdgeRow,
    EdgeWorkerRow,
    InputSource,
    Likeness,
    RunnerName,
)
from optigpu.documents.fields import Entry, unknown
from optigpu.documents.queries import Text
from optigpu.hardware.catalog import boards as catalog
from optigpu.report.formats import MISSING, Column, Grid, columns, csv_text, scaled, short, tabulated
from optigpu.store import edge_reports
from optigpu.store.database import Session
from optigpu.vocabulary import Document, Frozen

HEADINGS: dict[EdgeMetric, tuple[str, float]] = {
    EdgeMetric.LATENCY: ("latency p50 (ms)", 1e3),
    EdgeMetric.FPS: ("FPS", 1.0),
    EdgeMetric.ENERGY: ("energy (mJ)", 1e3),
    EdgeMetric.FPS_PER_WATT: ("FPS/W", 1.0),
    EdgeMetric.COST: ("USD per million", 1e6),
}
"""The heading of each metric's column, and what its values are multiplied by."""
LIKENESS = {
    Likeness.FILE: "the same file",
    Likeness.NETWORK: "the same network, other weights",
    Likeness.BODY: "the same network but for its last layer, other weights",
}
SHOWN_DIGITS = 12
"""Of a model's SHA-256: what tells models apart."""


def edge_grids(page: EdgePage) -> tuple[Grid, ...]:
    """A table for each board, and one of the workers beside it where there are some."""
    if not page.boards:
        columns = _columns()
        return (Grid(title="Edge leaderboard", columns=columns, rows=(), notes=(page.note or "",)),)
    return tuple(grid for board in page.boards for grid in _grids(board, page.cost))


def _grids(board: EdgeBoard, cost: CostAssumptions) -> Iterator[Grid]:
    grid = Grid(
        title=f"Edge leaderboard by {HEADINGS[board.metric][0]}: {_subject(board)}",
        columns=_columns(),
        rows=tuple(map(_cells, board.rows)),
        notes=tuple(_notes(board, cost)),
        faint=frozenset(number for number, row in enumerate(board.rows) if row.rank is None),
    )
    yield grid.without_empty_columns() if board.rows else grid
    if board.workers:
        yield _workers_grid(board)


def _subject(board: EdgeBoard) -> str:
    network = f"{board.network.label}, " if board.network else ""
    return f"{network}{board.model_sha256[:SHOWN_DIGITS]}, {board.input_source} input, {board.runner}"


def _columns() -> tuple[Column, ...]:
    return columns(
        "rank:",
        "device",
        "board",
        *(f"{name}:" for name, _ in HEADINGS.values()),
        "power by",
        "status",
        "flags",
    )


def _cells(row: EdgeRow) -> tuple[str, ...]:
    why = ", ".join(row.reasons)
    status = f"SIMULATED: {why}" if row.source is DeviceSource.SIMULATOR else why and f"not ranked: {why}"
    return (
        MISSING if row.rank is None else str(row.rank),
        row.device or row.device_id,
        row.board,
        *(_figure(row.figures[metric], scale) for metric, (_, scale) in HEADINGS.items()),
        row.power_source,
        status,
        ", ".join(row.flags),
    )


def _figure(figure: EdgeFigure, scale: float) -> str:
    """`54.1 [53.8, 54.6]`: the value with its spread."""
    if figure.value is None:
        return MISSING
    value = short(figure.value * scale)
    if figure.low is None or figure.high is None or figure.low == figure.high:
        return value
    return f"{value} [{short(figure.low * scale)}, {short(figure.high * scale)}]"


def _notes(board: EdgeBoard, cost: CostAssumptions) -> Iterator[str]:
    if not board.rows:
        yield board.note or "There are no more rows."
        return
    yield (
        f"{board.better.capitalize()} is better. [ ] is the spread over the run's windows; rows whose spreads overlap "
        "share a rank."
    )
    yield "energy includes the idle power, and FPS/W is inferences per joule; `power by` names the sensor."
    reasons = (row.figures[board.metric].reason for row in board.rows)
    yield from (f"no {board.metric}: {reason}" for reason in dict.fromkeys(filter(None, reasons)))
    if any(row.figures[EdgeMetric.COST].value is not None for row in board.rows):
        price = "the catalog's price" if cost.price is None else f"{cost.price:g} USD"
        energy = (
            "without energy"
            if cost.price_per_kwh is None
            else f"with energy at {cost.price_per_kwh:g} USD/kWh"
        )
        yield f"cost: {price} of a device over {cost.lifetime_years:g} years of nothing but inferences, {energy}."
    if len(board.rows) < board.row_count:
        yield f"{len(board.rows)} of {board.row_count} rows; model={board.model_sha256} lists all."
    if board.not_ranked and not any(row.reasons for row in board.rows):
        named = ", ".join(f"{reason} ({count})" for reason, count in board.not_ranked.items())
        yield f"Not ranked: {named}. They are listed with include_unranked=true."


def _workers_grid(board: EdgeBoard) -> Grid:
    energy = "energy includes the idle power, as a device's does, of what `energy by` counts: it may be the chip alone."
    reasons = dict.fromkeys(row.reason for row in board.workers if row.reason)
    return tabulated(
        f"Beside it, workers by energy per inference: {_subject(board)}",
        board.workers,
        {
            "hardware": lambda row: row.hardware,
            "backend": lambda row: row.backend,
            "variant": lambda row: row.label,
            "batch:": lambda row: MISSING if row.batch_size is None else str(row.batch_size),
            "FPS:": lambda row: short(row.images_per_s),
            "energy (mJ):": lambda row: scaled({"value": row.energy_per_inference_j}, 1e3),
            "FPS/W:": lambda row: short(row.fps_per_watt),
            "energy by": lambda row: row.energy_source or MISSING,
            "runs": lambda row: LIKENESS[row.likeness],
        },
        (energy, *(f"no energy: {reason}" for reason in reasons)),
    )


CSV_FIELDS = (
    "kind", "rank", "device_id", "device", "board", "source", "hardware", "backend", "label", "likeness", "batch_size",
    "model_sha256", "input_source", "runner", "runner_version", "clock_hz", "windows", "inferences",
    *(f"{metric}{part}" for metric in EdgeMetric for part in ("", "_low", "_high")),
    "power_source", "reasons", "flags", "measured_at", "report_id", "result_id",
)  # fmt: skip
"""The columns of the CSV form. `kind` is device or worker."""


def edge_csv(page: EdgePage) -> str:
    """The rows of all boards as raw values in SI units (cost in US dollars), each board's workers behind its devices. A
    cell is empty where a value is missing."""
    return csv_text(CSV_FIELDS, [record for board in page.boards for record in _records(board)])


def _records(board: EdgeBoard) -> Iterator[Document]:
    shared = board.model_dump(mode="json", include={"model_sha256", "input_source", "runner"})
    for row in board.rows:
        yield {**shared, **_device_record(row)}
    for worker in board.workers:
        yield {"model_sha256": board.model_sha256, **_worker_record(worker)}


def _device_record(row: EdgeRow) -> Document:
    same = row.model_dump(mode="json", include=set(CSV_FIELDS) - {"reasons", "flags"})
    figures = {
        f"{metric}{part}": value
        for metric, figure in row.figures.items()
        for part, value in (("", figure.value), ("_low", figure.low), ("_high", figure.high))
    }
    return {
        **same,
        **figures,
        "kind": "device",
        "reasons": " ".join(row.reasons),
        "flags": " ".join(row.flags),
        "measured_at": row.received_at.isoformat(),
    }


def _worker_record(row: EdgeWorkerRow) -> Document:
    return {
        **row.model_dump(mode="json", include=set(CSV_FIELDS)),
        "kind": "worker",
        str(EdgeMetric.LATENCY): row.latency_s,
        str(EdgeMetric.FPS): row.images_per_s,
        str(EdgeMetric.ENERGY): row.energy_per_inference_j,
        str(EdgeMetric.FPS_PER_WATT): row.fps_per_watt,
        "power_source": row.energy_source,
        "reasons": row.reason,
    }


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
    return written(page, form, edge_csv, edge_grids)
