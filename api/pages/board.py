"""The page at `/`: for each workload and model the best that was measured on each class of hardware."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.filters import check_filters
from api.pages.bars import Bar, FigureText, bars, figure_text, speedup_text
from api.pages.verdicts import Badge, badge
from api.pages.view import Asked, PageView, ReaderView
from api.routes.leaderboard import LeaderboardFilter
from optigpu.documents.views import Board, LeaderboardPage, LeaderboardRow
from optigpu.store import filters, leaderboard
from optigpu.store.database import Session
from optigpu.store.filters import DIGEST_LENGTH

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
        "board.html",
        asked=asked,
        boards=[(board, tuple(lines(board))) for board in page.boards],
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
