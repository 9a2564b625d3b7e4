"""Claims: published figures as data, read from baselines.toml. The rules judge them."""

import tomllib
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from typing import Literal, Self

from pydantic import Field, model_validator

from optigpu.models.presets import PRESETS
from optigpu.vocabulary import Document, Frozen, SpecError

UNITS: dict[str, float] = {
    "TFLOPS": 1.0,
    "tok/s": 1.0,
    "img/s": 1.0,
    "FPS": 1.0,
    "FPS/W": 1.0,
    "ms": 1e-3,
    "s": 1.0,
    "GB": 1e9,
    "MB": 1e6,
    "W": 1.0,
    "x": 1.0,
    "1": 1.0,
}
"""Printed units, as multiples of the metric's own unit."""
BINARY_UNITS: dict[str, float] = {"GB": 2.0**30, "MB": 2.0**20}
"""The other meaning of printed bytes: PyTorch's counters are often divided by powers of 1024 and called GB."""

Precision = Literal["fp32", "fp16", "bf16", "int8", "llm_int8", "int4", "nf4", "gptq", "awq", "q4_k_m"]
Workload = Literal["matmul", "generate", "inference", "classify", "attention", "train_step"]


class Status(StrEnum):
    """Where a figure comes from."""

    CLAIMED = "claimed"
    MEASURED_BY_OTHERS = "measured by others"
    MEASURED_HERE = "measured here"


class Claim(Frozen):
    """One published figure as it was printed, with the facts that are needed to check it.

    `metric` is the vocabulary's name where it has one; besides, `images_per_s`, `images_per_j`, `speedup`,
    `growth_exponent` (time grows with this power of the size) and `overhead_s`. `hardware` is None where the text
    names none, `techniques` is None where it is silent about them, `precision` is not among them.
    """

    id: str
    text: str
    source: str
    status: Status
    what: str
    hardware: str | None = None
    workload: Workload
    model: str | None = None
    precision: Precision | None = None
    techniques: tuple[str, ...] | None = None
    batch_size: int | None = Field(None, gt=0)
    size: int | None = Field(None, gt=0)
    sequence: int | None = Field(None, gt=0)
    heads: int | None = Field(None, gt=0)
    head_dim: int | None = Field(None, gt=0)
    metric: str
    value: float = Field(gt=0)
    unit: str
    ratio_of: tuple[str, str] | None = None
    series: tuple[str, ...] = ()
    rate_of: str | None = None
    power_of: str | None = None

    @property
    def quantity(self) -> float:
        """The figure in its metric's own unit."""
        return self.value * UNITS[self.unit]

    @property
    def subject(self) -> tuple[object, ...]:
        """The subject of the figure: equal for two claims about the same thing."""
        shapes = (self.batch_size, self.size, self.sequence, self.heads, self.head_dim)
        return (
            self.metric,
            self.hardware,
            self.workload,
            self.model,
            self.precision,
            self.techniques,
            shapes,
        )

    @model_validator(mode="after")
    def _known_unit_and_model(self) -> Self:
        if self.unit not in UNITS:
            raise ValueError(f"{self.id}: unknown unit {self.unit!r}; the units are {', '.join(UNITS)}")
        return self


class ImageModel(Frozen):
    """An image classifier, with its multiply-accumulates for one image."""

    name: str
    macs: float = Field(gt=0)
    source: str


class ThesisClaim(Frozen):
    """The project's founding claim, and the two machines that it compares."""

    sentence: str
    source: str
    smaller: str
    larger: str


class Book(Frozen):
    """All claims, and the models that they name."""

    claims: tuple[Claim, ...]
    image_models: tuple[ImageModel, ...]
    thesis: ThesisClaim

    def claim(self, claim_id: str) -> Claim:
        """Raises SpecError if there is no claim of that id."""
        for claim in self.claims:
            if claim.id == claim_id:
                return claim
        raise SpecError(
            f"There is no claim {claim_id!r} in the baselines; correct the relation that names it."
        )

    def image_model(self, name: str | None) -> ImageModel | None:
        return next((model for model in self.image_models if model.name == name), None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ids = [claim.id for claim in self.claims]
        if len(ids) != len(set(ids)):
            raise ValueError("two claims have the same id")
        known = {model.name for model in self.image_models} | PRESETS.keys()
        for claim in self.claims:
            named = {*(claim.ratio_of or ()), *claim.series, claim.rate_of, claim.power_of} - {None}
            if unknown := named - set(ids):
                raise ValueError(
                    f"{claim.id} refers to unknown claims: {', '.join(sorted(map(str, unknown)))}"
                )
            if claim.model is not None and claim.model not in known:
                raise ValueError(f"{claim.id}: unknown model {claim.model!r}")
        return self


@lru_cache(maxsize=1)
def baselines() -> Book:
    """The claims of baselines.toml."""
    return read_book(files("optigpu").joinpath("baselines.toml").read_text(encoding="utf-8"))


def read_book(text: str) -> Book:
    """The claims of a TOML document. Raises pydantic's ValidationError if it is not consistent."""
    document = tomllib.loads(text)
    return Book.model_validate(
        {
            "claims": [claim for section in document["text"] for claim in _claims_of(section)],
            "image_models": document["image_model"],
            "thesis": document["thesis"],
        }
    )


def _claims_of(section: Document) -> list[Document]:
    """The claims of a text, each with the facts that hold for the whole text."""
    shared = {"text": section["name"], "source": section["source"], "status": section["status"]}
    return [{**shared, **section.get("defaults", {}), **claim} for claim in section["claim"]]
