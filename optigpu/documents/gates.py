"""What a gate found, and the series of gates that a service keeps."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from optigpu.vocabulary import Better, Frozen

LONGEST_SERIES = 200
Series = Annotated[
    str, Field(min_length=1, max_length=LONGEST_SERIES, description="What its gates have in common.")
]
Figures = tuple[float, ...]
MOST_PAIRS = 1000


class GateVerdict(StrEnum):
    """How a gate ends."""

    NO_WORSE = "no worse"
    WORSE = "worse"
    CANNOT_SAY = "cannot say"


class GateOutcome(Frozen):
    """What a gate found. A loss is a share of the base's figure: 0.05 is 5% worse, -0.05 is 5% better; a ratio is that
    of head to base. Intervals, and the smallest loss that would have been found, are null where pairs are too few.
    `chance` is how often a loss as sure is seen, at any of a run's looks, where nothing differs."""

    schema_version: Literal[1] = 1
    verdict: GateVerdict
    exit_status: int
    metric: str = Field(max_length=200)
    better: Better
    worse_than: float
    ratio: float
    ratio_ci: tuple[float, float] | None
    loss: float
    loss_ci: tuple[float, float] | None
    smallest_loss_found: float | None
    chance: float = Field(1.0, ge=0, le=1)
    base: str = Field(max_length=400)
    head: str = Field(max_length=400)
    base_figures: Figures = Field(max_length=MOST_PAIRS)
    head_figures: Figures = Field(max_length=MOST_PAIRS)
    seconds: float
    minutes: float
    repeat: str = Field("", max_length=20_000)


class GateRequest(Frozen):
    """The outcome of a gate, to be kept in a series."""

    series: Series
    outcome: GateOutcome


class GateView(GateRequest):
    """A gate that was kept. `told` says that webhooks were told of its loss."""

    id: str
    at: datetime
    created_by: str
    told: bool


class GatePage(Frozen):
    """Gates, the newest first; `next_cursor` leads to the page after this one."""

    gates: tuple[GateView, ...]
    next_cursor: str | None = None
