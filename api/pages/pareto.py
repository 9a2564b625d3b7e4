"""The page at `/pareto`: the speed of a board's rows over bytes, quality, energy or the reader's own price."""

from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from api.filters import check_filters
from api.pages.prices import Prices
from api.pages.view import ReaderView
from api.parameters import Text
from optigpu.documents.views import Board, BoardName, LeaderboardRow
from optigpu.report.charts.boards import AXES, Axis, front_panel, speed_axis
from optigpu.report.charts.svg import figure
from optigpu.store import leaderboard
from optigpu.store.database import Session
from optigpu.store.filters import LeaderboardQuery

router = APIRouter()
ROWS = 200
WORDS = {
    "weights": "Bytes of weights",
    "memory": "Peak memory",
    "divergence": "Divergence from fp32",
    "agreement": "Top-1 agreement",
    "energy": "Energy",
    "price": "Price",
}
Over = StrEnum("Over", {name: name for name in WORDS})  # type: ignore[misc]


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
        return LeaderboardQuery(workload=digest, limit=ROWS, **asked)


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
        "pareto.html",
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
