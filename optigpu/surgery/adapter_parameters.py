"""The parameters of low-rank factors beside linear layers. Imports no torch."""

from typing import Literal

from pydantic import Field

from optigpu.vocabulary import Frozen

Targets = Literal["all-linear", "attention"]
"""Every linear layer but the head and the experts of a mixture, or those within attentions."""


class AdapterParameters(Frozen):
    """The parameters of a technique that trains factors A [rank, inputs] and B [outputs, rank] beside layers.

    A layer computes W x + alpha / rank * B A x; B begins at zero.
    """

    rank: int = Field(8, ge=1, le=1024, description="Rows of A, and columns of B.")
    alpha: float = Field(16.0, gt=0, le=4096, description="Weight of the factors, times the rank.")
    targets: Targets = Field("all-linear", description="Which layers get factors; the head never does.")
