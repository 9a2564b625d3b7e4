"""The pages at `/` and `/pareto`, and the feed at `/feed.atom`: what stands on the leaderboard.

The first shows for each workload and model the best that was measured on each class of hardware. The second shows the
speed of a board's rows over bytes, quality, energy or the reader's own price, which stands in the address of the page,
with a line through what no other row surpasses. The feed has the best ones, the newest first (RFC 4287).
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated
from xml.etree.ElementTree import Element, SubElement, tostring

from fastapi import APIRouter, Query, Response
from pydantic import Field

from api.charts import figure
from api.pages.figures import Badge, Bar, FigureText, badge, bars, figure_text, speedup_text
from api.pages.view import Asked, PageView, Plain, ReaderView
from api.routes.leaderboard import LeaderboardFilter, check_filters
from optigpu.documents.queries import LeaderboardQuery, Text
from optigpu.documents.views import Board, BoardName, LeaderboardPage, LeaderboardRow, Standing
from optigpu.report.charts.fronts import DIVERGENCE, with_front
from optigpu.report.charts.marks import Form, Interval, Mark, Panel
from optigpu.report.formats import with_interval
from optigpu.report.leaderboard import workload_text
from optigpu.report.others import others_grid
from optigpu.report.rows import heading
from optigpu.store import filters, leaderboard
from optigpu.store.database import Session
from optigpu.store.filters import DIGEST_LENGTH
from optigpu.vocabulary import Better


@dataclass(frozen=True)
class Axis:
    """A figure of a row that a chart can show: its name with the unit, its value and its interval."""

    name: str
    value: Callable[[LeaderboardRow], float | None]
    ci: Callable[[LeaderboardRow], Interval | None] = lambda _: None
    better: Better = Better.LOWER
    logarithmic: bool = False


AXES = {
    "weights": Axis("weights (MB)", lambda row: _times(row.weight_bytes, 1e-6)),
    "memory": Axis("peak memory (MB)", lambda row: _times(row.peak_bytes, 1e-6)),
    "divergence": Axis(DIVERGENCE, lambda row: row.kld_mean, logarithmic=True),
    "agreement": Axis(
        "top-1 agreement with fp32 (%)", lambda row: _times(row.top1_agreement, 100.0), better=Better.HIGHER
    ),
    "energy": Axis("energy (J/token)", lambda row: row.j_per_token),
}
"""What speed, or each other, can be shown over."""


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def speed_axis(board: Board) -> Axis:
    """The metric that a board is ranked by."""
    return Axis(
        heading(board.metric), lambda row: row.value.value, lambda row: row.value.ci, better=board.better
    )


def front_panel(
    rows: Sequence[LeaderboardRow],
    x: Axis,
    y: Axis,
    series: Callable[[LeaderboardRow], str] = lambda row: row.backend,
) -> Panel:
    """A point for each row that has both figures. On the front is what no other ranked row surpasses in the two."""
    several = len({series(row) for row in rows}) > 1
    marks: list[Mark] = []
    missing: dict[str, str] = {}
    for row in rows:
        at, value = x.value(row), y.value(row)
        if at is None or value is None:
            missing[row.label] = f"{x.name} or {y.name} was not measured"
            continue
        mark = Mark(
            label=row.label,
            series=series(row) if several else "",
            x=at,
            x_ci=x.ci(row),
            value=value,
            ci=y.ci(row),
            valid=row.standing is not Standing.INVALID,
            source=row.result_id,
        )
        marks.append(mark)
    panel = Panel(
        title=f"{y.name} over {x.name}",
        form=Form.FRONT,
        axis=y.name,
        x_axis=x.name,
        better=y.better,
        x_better=x.better,
        logarithmic=x.logarithmic,
        marks=tuple(marks),
        missing=missing,
    )
    return with_front(panel, [row.result_id for row in rows if row.standing is Standing.CURRENT])


router = APIRouter()
HARDWARE_ROWS = 8
"""Classes of hardware of a board, where there are several boards."""


class Column(StrEnum):
    """What a row shows besides its rank, its stack and its figure."""

    SPEEDUP = "speedup"
    BYTES = "bytes"
    QUALITY = "quality"
    ENERGY = "energy"
    VERDICT = "verdict"
    DATE = "date"


class BoardAsked(Asked, LeaderboardFilter):
    """The filters of the leaderboard, and which columns are shown."""

    columns: Annotated[tuple[Column, ...], Query(description="Columns to show.")] = tuple(Column)

    @property
    def one_board(self) -> bool:
        """Whether all rows of one board are asked for, and not the best ones of several."""
        return self.workload is not None and len(self.workload) == DIGEST_LENGTH

    def of_api(self) -> LeaderboardFilter:
        """The same question to the JSON API."""
        given = self.model_dump(exclude={"columns", "export"}, exclude_unset=True)
        best = {} if self.one_board else {"best": True, "limit": HARDWARE_ROWS}
        return LeaderboardFilter(**best | given)


@dataclass(frozen=True)
class Line:
    """A row, and how it is drawn. `shares` says that its rank is another row's too."""

    row: LeaderboardRow
    bar: Bar
    figure: FigureText
    speedup: FigureText | None
    badge: Badge
    shares: bool


@dataclass(frozen=True)
class Choices:
    """What the filters can be set to."""

    hardware: list[str]
    techniques: list[str]
    backends: list[str]
    models: list[str]
    workloads: list[str]


@router.get("/")
def read_board(view: ReaderView, asked: Annotated[BoardAsked, Query()]) -> Response:
    """Boards with their best rows; one board with all of its rows where it is asked for by its digest."""
    of_api = asked.of_api()
    with view.service.database.read() as session:
        check_filters(session, of_api)
        page = leaderboard.query(session, of_api)
        choices = _choices(session)
    return view.page(
        "board.html#board",
        asked=asked,
        boards=[(board, tuple(lines(board))) for board in page.boards],
        others=tuple(map(others_grid, page.others)),
        columns=Column,
        choices=choices,
        empty=page.note,
        next_cursor=_next_cursor(page, asked),
        curl=_curl(view, of_api),
        forms={name: of_api.link(view.look.root, format=name) for name in ("json", "csv", "md")},
    )


def lines(board: Board) -> Iterator[Line]:
    """The rows of a board with what is drawn of them."""
    ranks = [row.rank for row in board.rows]
    baselines = {(each.hardware, each.device): each for each in board.baselines}
    for row, bar in zip(board.rows, bars([row.value for row in board.rows]), strict=True):
        baseline = baselines.get((row.hardware, row.device))
        other = baseline is not None and baseline.result_id != row.result_id
        yield Line(
            row=row,
            bar=bar,
            figure=figure_text(row.value),
            speedup=speedup_text(baseline.value, row.value) if baseline and other else None,
            badge=badge(row.reasons, row.warnings),
            shares=row.rank is not None and ranks.count(row.rank) > 1,
        )


def _choices(session: Session) -> Choices:
    known = filters.known(session)
    return Choices(
        hardware=known["hardware"],
        techniques=known["technique"],
        backends=known["backend"],
        models=known["model"],
        workloads=known["workload"],
    )


def _next_cursor(page: LeaderboardPage, asked: BoardAsked) -> str | None:
    """Of the rows that follow where one board is read, or of the boards that follow."""
    return page.boards[0].next_cursor if asked.one_board and page.boards else page.next_cursor


def _curl(view: PageView, of_api: LeaderboardFilter) -> str:
    """The command that reads the same as JSON."""
    return f"curl -s {shlex.quote(of_api.link(view.origin))}"


FRONT_ROWS = 200
WORDS = {
    "weights": "Bytes of weights",
    "memory": "Peak memory",
    "divergence": "Divergence from fp32",
    "agreement": "Top-1 agreement",
    "energy": "Energy",
    "price": "Price",
}
Over = StrEnum("Over", {name: name for name in WORDS})  # type: ignore[misc]
SECONDS_A_YEAR = 365.25 * 86_400
JOULES_A_KWH = 3.6e6

Amount = Annotated[float, Field(ge=0, le=1e9)]


class Prices(Asked):
    """The reader's prices in one currency. `watts` is the power of hardware whose energy was not measured."""

    hardware_price: Annotated[Amount | None, Query(description="Price of the hardware.")] = None
    years: Annotated[
        Annotated[float, Field(gt=0, le=100)], Query(description="Years over which it is spread.")
    ] = 3.0
    kwh: Annotated[Amount | None, Query(description="Price of a kilowatt-hour.")] = None
    watts: Annotated[Amount | None, Query(description="Power where energy was not measured.")] = None

    def joules(self, row: LeaderboardRow) -> float | None:
        """Of a token: as it was measured, or the reader's power over the speed."""
        if row.j_per_token is not None:
            return row.j_per_token
        return self.watts / row.value.value if self.watts and row.value.value else None

    def per_million(self, row: LeaderboardRow) -> float | None:
        """The price of a million tokens: the hardware's share and the energy. None without a part that is asked for."""
        speed, joules = row.value.value, self.joules(row)
        if not speed or (self.hardware_price is None and self.kwh is None) or (self.kwh and joules is None):
            return None
        hardware = (self.hardware_price or 0.0) / (self.years * SECONDS_A_YEAR) / speed
        energy = (self.kwh or 0.0) * (joules or 0.0) / JOULES_A_KWH
        return 1e6 * (hardware + energy)

    def axes(self) -> dict[str, Axis]:
        """What speed can be shown over besides the axes of every board."""
        return {
            "energy": Axis("energy (J/token)", self.joules),
            "price": Axis("price of a million tokens", self.per_million),
        }


class ParetoAsked(Prices):
    """Which board, over what, and the rows' filters."""

    workload: Annotated[Text | None, Query(description="The digest of a board's workload.")] = None
    over: Annotated[Over, Query(description="What speed is shown over.")] = Over("weights")
    hardware: Text | None = None
    backend: Text | None = None
    max_kld: Annotated[Annotated[float, Field(ge=0)] | None, Query(description="Maximum divergence.")] = None
    clean: bool = False

    def query(self, digest: str | None) -> LeaderboardQuery:
        """The rows of the board."""
        asked = self.model_dump(include={"hardware", "backend", "max_kld", "clean"})
        return LeaderboardQuery(workload=digest, limit=FRONT_ROWS, **asked)


@router.get("/pareto")
def read_pareto(view: ReaderView, asked: Annotated[ParetoAsked, Query()]) -> Response:
    """Without a board the one with the newest result."""
    with view.service.database.read() as session:
        boards = _boards(session, asked.workload)
        digest = boards[0].workload_digest if boards else None
        check_filters(session, asked.query(asked.workload))
        found = leaderboard.query(session, asked.query(digest)).boards if digest else ()
    board = found[0] if found else None
    axis = (AXES | asked.axes())[asked.over]
    return view.page(
        "board.html#pareto",
        asked=asked,
        boards=boards,
        board=board,
        words=WORDS,
        chart=_chart(board, axis, view.look.root) if board else None,
        rows=_rows(board, asked) if board else (),
        hardware=sorted({row.hardware for row in board.rows}) if board else [],
        backends=sorted({row.backend for row in board.rows}) if board else [],
    )


def _boards(session: Session, digest: str | None) -> list[BoardName]:
    """The newest boards to choose from, the one that is asked for first."""
    newest = leaderboard.names(session)
    if digest is None:
        return newest
    asked = [board for board in newest if board.workload_digest == digest]
    others = (board for board in newest if board.workload_digest != digest)
    return [*(asked or leaderboard.names(session, digest)), *others]


def _chart(board: Board, axis: Axis, root: str) -> object:
    several = len({row.hardware for row in board.rows}) > 1
    return figure(
        front_panel(
            board.rows, axis, speed_axis(board), lambda row: row.hardware if several else row.backend
        ),
        id_prefix="front",
        link=lambda source: f"{root}/results/{source}",
    )


def _rows(board: Board, asked: ParetoAsked) -> list[tuple[LeaderboardRow, float | None, float | None]]:
    """Each row with its price of a million tokens and its joules per token, the cheapest first."""
    rows = [(row, asked.per_million(row), asked.joules(row)) for row in board.rows]
    return sorted(rows, key=lambda each: (each[1] is None, each[1] or 0.0, each[0].rank or 0))


ATOM = "http://www.w3.org/2005/Atom"
ENTRIES = 50
FEED_ROWS = 50


@router.get("/feed.atom")
def read_feed(view: ReaderView, _: Plain) -> Response:
    """Of the newest boards."""
    with view.service.database.read() as session:
        page = leaderboard.query(session, LeaderboardQuery(best=True, limit=FEED_ROWS))
    bests = [(board, row) for board in page.boards for row in board.rows if row.rank is not None]
    newest = sorted(bests, key=lambda each: each[1].measured_at, reverse=True)[:ENTRIES]
    text = tostring(_feed(view.origin, newest), encoding="utf-8", xml_declaration=True)
    return Response(text, media_type="application/atom+xml", headers={"Cache-Control": "private, no-cache"})


def _feed(origin: str, bests: list[tuple[Board, LeaderboardRow]]) -> Element:
    feed = Element("feed", xmlns=ATOM)
    _add_text(feed, "id", f"{origin}/feed.atom")
    _add_text(feed, "title", "OptiGPU: new bests")
    _add_text(feed, "updated", bests[0][1].measured_at.isoformat() if bests else "1970-01-01T00:00:00+00:00")
    SubElement(SubElement(feed, "author"), "name").text = "OptiGPU"
    SubElement(feed, "link", rel="self", href=f"{origin}/feed.atom")
    SubElement(feed, "link", href=f"{origin}/")
    for board, row in bests:
        entry = SubElement(feed, "entry")
        for name, text in _entry(board, row):
            _add_text(entry, name, text)
        SubElement(entry, "link", href=f"{origin}/results/{row.result_id}")
    return feed


def _entry(board: Board, row: LeaderboardRow) -> Iterator[tuple[str, str]]:
    figure = f"{with_interval(row.value.model_dump())} {heading(row.metric)}"
    yield "id", f"urn:uuid:{row.result_id}"
    yield "title", f"{figure} by {row.label} on {row.hardware}"
    yield "updated", row.measured_at.isoformat()
    yield "summary", f"{workload_text(board.workload, board.model)}: {figure}, rank {row.rank} of its board."


def _add_text(parent: Element, name: str, text: str) -> None:
    """Without what XML cannot hold."""
    kept = (
        letter for letter in text if letter in "\t\n\r" or (letter >= " " and letter not in "\ufffe\uffff")
    )
    SubElement(parent, name).text = "".join(kept)
