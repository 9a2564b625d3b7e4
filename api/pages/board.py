"""The page at `/`: for each workload and model the best that was measured on each class of hardware."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.filters import check_filters
from api.pages.bars import Bar, FigureText, bars, figure_text
from api.pages.verdicts import Badge, badge
from api.pages.view import Asked, PageView, ReaderView
from api.routes.leaderboard import LeaderboardFilter
from optigpu.documents.views import Board, LeaderboardPage, LeaderboardRow
from optigpu.store import filters, leaderboard
from optigpu.store.database import Session

router = APIRouter()


class Column(StrEnum):
    """What a row shows besides its rank, its stack and its figure."""

    BYTES = "bytes"
    QUALITY = "quality"
    ENERGY = "energy"
    VERDICT = "verdict"
    DATE = "date"


class BoardAsked(Asked, LeaderboardFilter):
    """The filters of the leaderboard, and which columns are shown."""

    columns: Annotated[tuple[Column, ...], Query(description="Columns to show.")] = tuple(Column)

    def of_api(self) -> LeaderboardFilter:
        """The same question to the JSON API."""
        return LeaderboardFilter(**self.model_dump(exclude={"columns", "export"}, exclude_unset=True))


@dataclass(frozen=True)
class Line:
    """A row, and how it is drawn. `shares` says that its rank is another row's too."""

    row: LeaderboardRow
    bar: Bar
    figure: FigureText
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
    """Boards with their first rows; one board with all of its rows where its workload is asked for."""
    with view.service.database.read() as session:
        query = asked.of_api().query()
        check_filters(session, query)
        page = leaderboard.query(session, query)
        choices = _choices(session)
    return view.page(
        "board.html",
        asked=asked,
        boards=[(board, tuple(lines(board))) for board in page.boards],
        columns=Column,
        choices=choices,
        empty=page.note,
        next_cursor=_next_cursor(page, asked),
        curl=_curl(view, asked),
        forms={name: asked.of_api().link(view.look.root, format=name) for name in ("json", "csv", "md")},
    )


def lines(board: Board) -> Iterator[Line]:
    """The rows of a board with what is drawn of them."""
    ranks = [row.rank for row in board.rows]
    for row, bar in zip(board.rows, bars([row.value for row in board.rows]), strict=True):
        yield Line(
            row=row,
            bar=bar,
            figure=figure_text(row.value),
            badge=badge(row.reasons, row.warnings),
            shares=row.rank is not None and ranks.count(row.rank) > 1,
        )


def _choices(session: Session) -> Choices:
    return Choices(
        hardware=filters.hardware(session),
        techniques=filters.techniques(session),
        backends=filters.backends(session),
        models=filters.models(session),
        workloads=filters.workloads(session),
    )


def _next_cursor(page: LeaderboardPage, asked: BoardAsked) -> str | None:
    """Of the rows that follow where one board is read, or of the boards that follow."""
    if len(page.boards) == 1 and not asked.continues_list:
        return page.boards[0].next_cursor
    return page.next_cursor


def _curl(view: PageView, asked: BoardAsked) -> str:
    """The command that reads the same as JSON."""
    return f"curl -s {shlex.quote(asked.of_api().link(str(view.request.base_url).rstrip('/')))}"
