"""The page at `/pareto`: the speed of a board's rows over bytes, quality, energy or the reader's own price.

The reader's prices stand in the address of the page.
"""

from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from api.charts import figure
from api.charts.fronts import AXES, Axis, front_panel, speed_axis
from api.filters import check_filters
from api.pages.view import Asked, ReaderView
from optigpu.documents.queries import LeaderboardQuery, Text
from optigpu.documents.views import Board, BoardName, LeaderboardRow
from optigpu.store import leaderboard
from optigpu.store.database import Session

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
