"""A run as it is kept in a file, and sent to a service."""

from datetime import datetime
from typing import Any

from pydantic import Field, field_validator

from optigpu.documents.older import current
from optigpu.documents.result import Attribution, Result, Samples
from optigpu.vocabulary import Frozen, VariantStatus

RUN_FORMAT = 1
"""Of the document. A program refuses one of a later format, and reads all earlier ones."""


class KeptOutcome(Frozen):
    """How one variant of a run ended: the reason why it has no result, or the raw samples of its result."""

    index: int
    status: VariantStatus
    reason: str | None = None
    samples: dict[str, Samples] = Field(default_factory=dict)


class RunDocument(Frozen):
    """A report with its raw samples. `stopped` says why the run ended before everything was measured."""

    format: int = RUN_FORMAT
    id: str
    created_at: datetime
    spec: dict[str, Any]
    results: tuple[Result, ...]
    attribution: Attribution
    outcomes: tuple[KeptOutcome, ...]
    stopped: str | None = None

    @field_validator("results", mode="before")
    @classmethod
    def _of_today(cls, results: object) -> object:
        """Those of older schema versions by today's names."""
        if not isinstance(results, list):
            return results
        return [current(each) if isinstance(each, dict) else each for each in results]
