"""What the leaderboard is asked: the parameters of the call, and the flags of the command."""

from typing import Annotated

from pydantic import Field

from optigpu.documents.views import Standing
from optigpu.vocabulary import Frozen

PRINTABLE = r"^[^\x00-\x1f\x7f]+$"
"""No control characters, which not every database takes."""
ROWS = 50
HEAD_ROWS = 5
"""How many rows a board shows where it is the only one, and where there are several."""
Text = Annotated[str, Field(max_length=200, pattern=PRINTABLE)]
"""A word to filter by."""


class LeaderboardQuery(Frozen):
    """What to list. None leaves a filter out.

    `workload` is a kind, or a workload's digest, which selects one board; `hardware` is in any case of letters.
    `min_top1` and `max_kld` leave out what is worse. Sources are never mixed: a device's own report is not ranked with
    a worker's.
    """

    metric: Text | None = Field(
        None, description="What boards are ranked by. Default: the primary metric of each board's workload."
    )
    workload: Text | None = Field(
        None, description="A kind of workload, or the digest of one board's workload."
    )
    model: Text | None = Field(None, description="A model, as a job names it.")
    hardware: Text | None = Field(None, description="Part of a hardware class.")
    technique: Text | None = Field(None, description="A technique that must be in the stack.")
    backend: Text | None = Field(None, description="An engine.")
    min_top1: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Minimum `top1_agreement` with fp32; rows without that figure are left out.",
    )
    max_kld: float | None = Field(
        None, ge=0, description="Maximum `kld_mean`, in nats; rows without that figure are left out."
    )
    clean: bool = Field(False, description="Leave out rows with warnings.")
    pareto: bool = Field(
        False,
        description="Only rows that no other of the same hardware beats in speed, memory, quality and energy.",
    )
    best: bool = Field(
        False, description="Only the first row of each class of hardware, with the baselines there."
    )
    include_invalid: bool = Field(
        False, description="Add invalid results, without a rank and with their reasons."
    )
    include_history: bool = Field(
        False, description="Add earlier results of the same variant and hardware, without a rank."
    )
    others: bool = Field(
        False,
        description="Add what other tools measured and was imported, apart and without a rank; of the filters `model` "
        "(a part of the name) and `metric` apply.",
    )
    source: Text = Field("worker", description="Where results come from.")
    limit: int | None = Field(
        None,
        ge=1,
        le=200,
        description=f"The largest number of rows of a board. Default: {ROWS}; {HEAD_ROWS} for several boards.",
    )
    cursor: str | None = Field(
        None, max_length=500, pattern=PRINTABLE, description="`next_cursor` of the page before."
    )

    @property
    def standings(self) -> list[Standing]:
        """Which results are listed."""
        added = {Standing.EARLIER: self.include_history, Standing.INVALID: self.include_invalid}
        return [standing for standing in Standing if added.get(standing, True)]
