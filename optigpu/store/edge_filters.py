"""What the edge leaderboard can be filtered by, as conditions on its standings, and the names of what there is."""

from collections.abc import Iterable

from pydantic import Field
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from optigpu.documents.devices import InputSource, RunnerName
from optigpu.documents.edge import LIFETIME_YEARS, CostAssumptions, EdgeMetric
from optigpu.store.edge_figures import Costs
from optigpu.store.tables import DeviceReportRow, EdgeModel, EdgeStanding
from optigpu.vocabulary import Frozen


class EdgeQuery(Frozen):
    """What to list. None leaves a filter out.

    `model` is the beginning of a file's SHA-256, `board` a name of the catalog of boards. `prices` are the catalog's,
    by board, in US dollars; `price` is taken in their place. `include_unranked` adds what does not rank, with its
    reasons.
    """

    metric: EdgeMetric = EdgeMetric.LATENCY
    model: str | None = None
    board: str | None = None
    input: InputSource | None = None
    runner: RunnerName | None = None
    include_unranked: bool = False
    price: float | None = None
    price_per_kwh: float | None = None
    lifetime_years: float = LIFETIME_YEARS
    prices: dict[str, float] = Field(default_factory=dict)
    limit: int | None = None
    cursor: str | None = None

    @property
    def assumptions(self) -> CostAssumptions:
        """What costs are computed from."""
        return CostAssumptions(
            price=self.price, price_per_kwh=self.price_per_kwh, lifetime_years=self.lifetime_years
        )

    def costs(self, board: str) -> Costs:
        """What a device with that board costs."""
        price = self.prices.get(board) if self.price is None else self.price
        return Costs(price, self.price_per_kwh, self.lifetime_years)


def conditions(query: EdgeQuery) -> Iterable[ColumnElement[bool]]:
    """What a standing and its report have to be."""
    if query.model is not None:
        yield EdgeStanding.model_sha256.startswith(query.model.lower(), autoescape=True)
    if query.input is not None:
        yield EdgeStanding.input_source == query.input
    if query.runner is not None:
        yield EdgeStanding.runner == query.runner
    if query.board is not None:
        yield DeviceReportRow.board == query.board


def models(session: Session) -> list[str]:
    """The files of models that the service knows or has reports of, sorted."""
    known = session.scalars(select(EdgeModel.sha256)).all()
    return sorted({*known, *session.scalars(select(EdgeStanding.model_sha256).distinct())})


def boards(session: Session) -> list[str]:
    """The boards of standing reports, sorted."""
    standing = select(DeviceReportRow.board).join(EdgeStanding, EdgeStanding.report_id == DeviceReportRow.id)
    return sorted(set(session.scalars(standing.distinct())))
