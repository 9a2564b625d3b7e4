"""What tokens cost by the reader's own prices, which stand in the address of the page."""

from typing import Annotated

from fastapi import Query
from pydantic import Field

from api.pages.view import Asked
from optigpu.documents.views import LeaderboardRow
from optigpu.report.charts.boards import Axis

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
