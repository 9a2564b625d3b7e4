"""Whether a model fits a board, before it is flashed: flash, SRAM, PSRAM, and the latency to expect on an ESP32-S3,
from published figures, which published.toml holds. Pure functions of numbers. A prediction is never a measurement and
is shown with its sources."""

import tomllib
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from optigpu.documents.fields import require_known
from optigpu.documents.manifest import ModelManifest
from optigpu.edge.tflite import operators
from optigpu.hardware.catalog import Board, board, boards
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
        return None if self.macs is None else self.macs / self.latency_s

    @property
    def sentence(self) -> str:
        size = "x".join(map(str, self.input))
        rate = "" if self.macs_per_s is None else f", {self.macs_per_s / 1e6:.0f} million MACs/s"
        return f"{self.name} {size}: {self.latency_s * 1e3:,.4g} ms{rate} ({self.source})"


@lru_cache(maxsize=1)
def published_figures() -> tuple[PublishedFigure, ...]:
    text = files("optigpu.edge").joinpath("published.toml").read_text(encoding="utf-8")
    return tuple(PublishedFigure.model_validate(entry) for entry in tomllib.loads(text)["figure"])


CLAIMED_FPS = 50
CLAIMED_W = 0.5
"""The founding claim for MobileNetV2 on an ESP32-S3."""


class Prediction(Frozen):
    """A range of latencies that published rates give for a model, with the figures that it rests on.

    `low_s` takes the highest of their rates and `high_s` the lowest, both at `clock_hz`.
    """

    kind: Literal["prediction"] = "prediction"
    engine: Engine
    macs: int
    clock_hz: int
    low_s: float
    high_s: float
    max_fps: float
    figures: tuple[PublishedFigure, ...]


class ClaimCheck(Frozen):
    """Whether 50 inferences in a second are plausible: the rate that it takes, beside the highest published one.

    It is not even `possible` above the peak of the chip's vector units, `peak_macs_per_s`.
    """

    macs: int
    needed_macs_per_s: float
    published_macs_per_s: float
    peak_macs_per_s: float
    published: PublishedFigure
    plausible: bool
    possible: bool
    sentence: str


def predict(macs: int) -> Prediction:
    """The latencies that the published figures of TFLite Micro with ESP-NN give for a model of so many MACs (at least
    1)."""
    figures = tuple(each for each in published_figures() if each.engine is Engine.ESP_NN and each.macs_per_s)
    rates = sorted(map(_rate, figures))
    low, high = macs / rates[-1], macs / rates[0]
    return Prediction(
        engine=Engine.ESP_NN,
        macs=macs,
        clock_hz=CLOCK_HZ,
        low_s=low,
        high_s=high,
        max_fps=1 / low,
        figures=figures,
    )


def fastest_published() -> PublishedFigure:
    """The figure with the highest rate for a separable network, of any engine and any number of cores."""
    return max((each for each in published_figures() if each.shape == "separable" and each.macs), key=_rate)


def check_claim(macs: int) -> ClaimCheck:
    """The founding claim, 50 FPS at 0.5 W for MobileNetV2, for one of so many MACs."""
    best = fastest_published()
    needed, rate, peak = macs * CLAIMED_FPS, _rate(best), boards()[0].peak_macs_per_s
    if needed <= rate:
        word, why = "plausible", "so the rate is plausible and has to be measured"
    elif needed <= peak:
        word = "implausible"
        why = (
            f"so at most {rate / macs:.1f} FPS are plausible, and {CLAIMED_FPS} FPS at {CLAIMED_W} W are not"
        )
    else:
        word, why = "impossible", f"and the peak of its vector units {peak / 1e6:,.0f} million"
    return ClaimCheck(
        macs=macs,
        needed_macs_per_s=needed,
        published_macs_per_s=rate,
        peak_macs_per_s=peak,
        published=best,
        plausible=needed <= rate,
        possible=needed <= peak,
        sentence=(
            f"The founding claim is {word} here: {CLAIMED_FPS} FPS of {macs / 1e6:.1f} million MACs take "
            f"{needed / 1e6:,.0f} million MACs/s; the fastest published for a MobileNet on this chip is "
            f"{rate / 1e6:,.0f} million ({best.name} by ESP-DL, {best.cores} cores), {why}."
        ),
    )


def _rate(figure: PublishedFigure) -> float:
    rate = figure.macs_per_s
    assert rate is not None
    return rate


class Place(StrEnum):
    """Where something lies on a board."""

    SRAM = "sram"
    PSRAM = "psram"


class BoardFit(Frozen):
    """What a board has for a model, and where the parts of it go.

    `flash_left_bytes` is negative by what is missing. `arena` is null where the arena fits nowhere, and
    `model_in_ram` says where a runner that reads the model from a file can keep it beside the arena. `reasons` say why
    the model does not fit, or what costs speed.
    """

    board: str
    module: str
    flash_bytes: int
    flash_left_bytes: int
    sram_bytes: int
    psram_bytes: int
    arena: Place | None
    model_in_ram: Place | None
    fits: bool
    reasons: tuple[str, ...]


class Fit(Frozen):
    """A model beside boards. `prediction` and `claim` are null for a model without MACs.

    `unaccelerated` are the operators for which ESP-NN has no kernel.
    """

    model: str
    sha256: str
    model_bytes: int
    arena_bytes: int
    macs: int
    unaccelerated: tuple[str, ...]
    boards: tuple[BoardFit, ...]
    prediction: Prediction | None
    claim: ClaimCheck | None


def fit(manifest: ModelManifest, only: str | None = None) -> Fit:
    """The verdicts for all boards, or for one. Raises SpecError for a board that is not listed."""
    found = board(only) if only is not None else None
    if only is not None and found is None:
        require_known(only, [each.id for each in boards()], f"Unknown board {only!r}", "Valid:")
    macs, names = manifest.macs, [each.name for each in manifest.operators]
    claimed = macs and manifest.network.family == "mobilenet_v2"
    return Fit(
        model=manifest.network.label,
        sha256=manifest.sha256,
        model_bytes=manifest.model_bytes,
        arena_bytes=manifest.arena_bytes,
        macs=macs,
        unaccelerated=tuple(name for name in names if name not in operators().esp_nn.operators),
        boards=tuple(
            fit_board(manifest.model_bytes, manifest.arena_bytes, each)
            for each in ((found,) if found else boards())
        ),
        prediction=predict(macs) if macs else None,
        claim=check_claim(macs) if claimed else None,
    )


def fit_board(model_bytes: int, arena_bytes: int, place: Board) -> BoardFit:
    """The verdict for one board. The model stays in flash; only its arena needs memory."""
    left, sram = place.flash_for_model_bytes - model_bytes, place.sram_for_arena_bytes
    arena = Place.SRAM if arena_bytes <= sram else Place.PSRAM if arena_bytes <= place.psram_bytes else None
    in_psram = model_bytes + (arena_bytes if arena is Place.PSRAM else 0)
    model = Place.PSRAM if arena is not None and in_psram <= place.psram_bytes else None
    if model_bytes + arena_bytes <= sram:
        model = Place.SRAM
    return BoardFit(
        board=place.id,
        module=place.module,
        flash_bytes=place.flash_bytes,
        flash_left_bytes=left,
        sram_bytes=sram,
        psram_bytes=place.psram_bytes,
        arena=arena,
        model_in_ram=model,
        fits=left >= 0 and arena is not None,
        reasons=tuple(_reasons(left, arena_bytes, arena, place)),
    )


def _reasons(left: int, arena_bytes: int, arena: Place | None, place: Board) -> list[str]:
    reasons = []
    if left < 0:
        reasons.append(
            f"The model is {-left:,} bytes larger than the flash that firmware and agent leave; "
            "use a narrower network or a board with more flash."
        )
    if arena is None:
        most = max(place.sram_for_arena_bytes, place.psram_bytes)
        reasons.append(
            f"The tensor arena of {arena_bytes:,} bytes fits neither SRAM nor PSRAM, {most:,} bytes at most; "
            "use a smaller input or a board with PSRAM."
        )
    if arena is Place.PSRAM:
        reasons.append(f"The tensor arena lies in {place.psram_bus} PSRAM, which is slower than SRAM.")
    return reasons
