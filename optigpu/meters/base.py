"""The interface of a meter: one pass around a workload's request, apart from the timed rounds."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import Field, field_validator, model_validator

from optigpu.backends.runtime import Runtime
from optigpu.documents.endpoints import parse_endpoint
from optigpu.documents.facts import MeterFacts
from optigpu.documents.selftest import Comparison
from optigpu.quality.text import HELLASWAG, SELF_WRITTEN, check_name
from optigpu.vocabulary import Frozen, UnsupportedError, as_value_error
from optigpu.workloads.base import Request, Workload

TOKENS, SECONDS = 512, 10.0
"""How many tokens of a text count, and how long a variant may take for so many."""


class QualityOptions(Frozen):
    """On which text quality is measured, and over how many steps of training."""

    text: str = Field(
        "self",
        max_length=200,
        description='The text: "self" (sampled from the fp32 model itself), "wikitext-2", "hellaswag", or '
        '"file:NAME", a text under OPTIGPU_DATASETS_DIR.',
    )
    tokens: int = Field(
        TOKENS,
        ge=16,
        le=1_000_000,
        description="How many tokens of the text count; of hellaswag, at how many positions it is compared with fp32.",
    )
    seconds: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="The most seconds in which a variant predicts them, window by window; what it does not reach is "
        "left out, and the interval is wider. Null: 10 s for every 512 tokens. Hellaswag is always whole.",
    )
    window: int | None = Field(
        None, ge=2, le=131072, description="Tokens in a window; null: all that are decoded, 128 of self."
    )
    stride: int | None = Field(
        None,
        ge=1,
        le=131072,
        description="Tokens from one window's begin to the next; null takes half a window.",
    )
    steps: int = Field(
        20,
        ge=8,
        le=100_000,
        description="Of train_step: how many steps of training are compared with fp32's.",
    )
    seeds: int = Field(
        5,
        ge=2,
        le=50,
        description="Of train_step: with how many seeds fp32 is trained, whose differences are the band.",
    )
    reference: str | None = Field(
        None,
        max_length=2000,
        description="Of the backend endpoint: another server, as URL#MODEL, which servers are compared with instead of "
        "with the fp32 model.",
    )
    probabilities: Annotated[int, Field(ge=1, le=10_000_000)] | Literal["all"] | None = Field(
        None,
        description="Of the backend endpoint: of how many tokens the server is asked for log-probabilities at each "
        'position, or "all"; of less where it refuses. Null: 1,000.',
    )
    items: int = Field(200, ge=2, le=100_000, description="How many items of hellaswag count.")

    @property
    def most_seconds(self) -> float:
        """In which a variant predicts the tokens of windows."""
        return self.seconds or SECONDS * max(1.0, self.tokens / TOKENS)

    @field_validator("text")
    @classmethod
    def _known(cls, text: str) -> str:
        return check_name(text)

    @field_validator("reference")
    @classmethod
    def _server(cls, text: str | None) -> str | None:
        return None if text is None else str(as_value_error(parse_endpoint, text))

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.reference is not None and self.text in (SELF_WRITTEN, HELLASWAG):
            raise ValueError(
                f"{self.text} needs the fp32 model; with a reference name wikitext-2 or file:NAME"
            )
        if self.window is not None and self.window > self.tokens:
            raise ValueError("window must not exceed tokens")
        if self.stride is not None and self.stride >= (self.window or self.tokens):
            raise ValueError("stride must be less than window, so that each token has others before it")
        return self


@dataclass(frozen=True)
class MeterContext:
    """The inputs of a meter. `folder` is shared by the processes of a job and removed at its end."""

    runtime: Runtime
    request: Request
    workload: Workload
    model: str | None
    folder: Path
    seed: int
    quality: QualityOptions


@dataclass(frozen=True)
class Reading:
    """A number for each metric, or the reason why there is none; `facts` say how it was read. `artifacts` are files in
    the context's folder to be kept with the result, by their names there."""

    values: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    facts: MeterFacts = field(default_factory=MeterFacts)
    artifacts: dict[str, Path] = field(default_factory=dict)


class Meter(Protocol):
    """Reads something of a prepared request.

    `once` means that one process of a variant is enough (for what it computes, not how fast): only the first is read.
    `timed` means that its values depend on how fast the machine is meanwhile: what disturbs a reading is then watched,
    as in the timed rounds. `metrics` are the names that it gives a number or a reason for.
    """

    once: ClassVar[bool] = False
    timed: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()

    def none(self, why: str) -> "Reading":
        """There is one reason for all metrics."""
        return Reading(reasons=dict.fromkeys(self.metrics, why))

    def read(self, context: MeterContext) -> Reading:
        """One pass; it may run the request. A value that cannot be read becomes a reason; an error does not affect the
        other meters."""

    def self_test(self, context: MeterContext) -> Comparison:
        """A quick reading compared with what it must be, with a small trained model that decodes text. Raises
        UnsupportedError where this machine has nothing to read."""


def require_read(reading: Reading, *names: str) -> None:
    """Raises UnsupportedError with the reason of the first of these metrics that has no value."""
    for name in names:
        if name not in reading.values:
            raise UnsupportedError(reading.reasons.get(name, f"The meter read no {name}."))


def keep_running(request: Request, seconds: float, stop: Callable[[], bool]) -> int:
    """Whole requests, one at least, until `seconds` are over or `stop` says so; how many there were."""
    ends = time.perf_counter() + seconds
    count = 0
    while count == 0 or (time.perf_counter() < ends and not stop()):
        request.run()
        count += 1
    return count
