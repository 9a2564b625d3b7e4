"""What other tools measured, as it is imported: marked with the tool, read apart, never ranked."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, field_validator

from optigpu.vocabulary import METRICS, Frozen

Statistic = Literal["mean", "median", "p90", "p95", "p99", "whole"]
"""Of the requests or repetitions of a row; `whole` is one figure of all of them together."""
LONGEST_TEXT = 500
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT, pattern=r"^[^\x00-\x1f\x7f]+$")]
MOST_FIGURES, MOST_ROWS, MOST_LEFT_OUT = 100, 500, 2000
MOST_FILES = 50
"""Of a page of the leaderboard."""


class OthersFigure(Frozen):
    """A figure in our own unit. `named` is where the tool's file has it; `differs` says in which way the tool counts
    something else than our metric does, and is null where both definitions are the same."""

    metric: str
    statistic: Statistic
    value: float
    named: Text
    differs: Text | None = None

    @field_validator("metric")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METRICS:
            raise ValueError(f"there is no metric {name!r}; the metrics are {', '.join(METRICS)}")
        return name


class OthersRow(Frozen):
    """The figures of one load or one test of a file."""

    label: Text
    figures: tuple[OthersFigure, ...] = Field(min_length=1, max_length=MOST_FIGURES)


class LeftOut(Frozen):
    """A figure of the file that no metric of ours is, or one that was looked for and is missing."""

    named: Text
    why: Text


class OthersFile(Frozen):
    """A tool's file. What it does not say is null: its own version, the moment, the model, the hardware."""

    tool: Text
    version: Text | None = None
    measured_at: datetime | None = None
    model: Text | None = None
    hardware: Text | None = None
    rows: tuple[OthersRow, ...] = Field(min_length=1, max_length=MOST_ROWS)
    left_out: tuple[LeftOut, ...] = Field((), max_length=MOST_LEFT_OUT)

    @property
    def title(self) -> str:
        """For example "measured by others: GuideLLM 0.8.1, SmolLM2"."""
        version = f" {self.version}" if self.version else ", version unknown"
        return ", ".join(
            filter(None, (f"measured by others: {self.tool}{version}", self.model, self.hardware))
        )


class OthersView(OthersFile):
    """A file that was imported; with its `id` it is removed."""

    id: str
    imported_at: datetime
