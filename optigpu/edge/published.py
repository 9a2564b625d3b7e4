"""Published latencies on an ESP32-S3, read from published.toml."""

import tomllib
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from optigpu.vocabulary import Frozen

CLOCK_HZ = 240_000_000
"""The clock of all published figures."""

Positive = Annotated[float, Field(gt=0)]


class Engine(StrEnum):
    """What ran the network: TFLite Micro with ESP-NN, TFLite Micro with its own kernels, or ESP-DL."""

    ESP_NN = "esp_nn"
    REFERENCE = "reference"
    ESP_DL = "esp_dl"


class PublishedFigure(Frozen):
    """One latency that others published. `macs` are null where they are not known, and so is the rate."""

    name: str
    engine: Engine
    shape: Literal["separable", "other"]
    cores: int = Field(1, ge=1, le=2)
    input: tuple[int, ...]
    macs: int | None = Field(None, gt=0)
    macs_source: str | None = None
    latency_s: Positive
    arena: Literal["sram", "psram"] | None = None
    source: str

    @model_validator(mode="after")
    def _sourced(self) -> Self:
        if (self.macs is None) != (self.macs_source is None):
            raise ValueError("macs need their source")
        return self

    @property
    def macs_per_s(self) -> float | None:
        """The rate that follows."""
        return None if self.macs is None else self.macs / self.latency_s

    @property
    def sentence(self) -> str:
        """The figure with its rate, as a note shows it."""
        size = "x".join(map(str, self.input))
        rate = "" if self.macs_per_s is None else f", {self.macs_per_s / 1e6:.0f} million MACs/s"
        return f"{self.name} {size}: {self.latency_s * 1e3:,.4g} ms{rate} ({self.source})"


@lru_cache(maxsize=1)
def published_figures() -> tuple[PublishedFigure, ...]:
    """All figures, in the order of the file."""
    text = files("optigpu.edge").joinpath("published.toml").read_text(encoding="utf-8")
    return tuple(PublishedFigure.model_validate(entry) for entry in tomllib.loads(text)["figure"])
