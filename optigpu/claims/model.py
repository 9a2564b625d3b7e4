"""Claims: published figures as data, read from the files of `book/`. The rules judge them."""

import tomllib
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from typing import Literal, Self

from pydantic import Field, model_validator

from optigpu.claims.terms import CLAIM_METRICS, UNITS, Precision, Workload
from optigpu.models.presets import PRESETS
from optigpu.vocabulary import METRICS, Document, Frozen, SpecError


class Status(StrEnum):
    """Where a figure comes from."""

    CLAIMED = "claimed"
    MEASURED_BY_OTHERS = "measured by others"
    MEASURED_HERE = "measured here"


class Claim(Frozen):
    """One published figure as it was printed, with the facts that are needed to check it.

    `metric` is the vocabulary's name where it has one, else one of CLAIM_METRICS. `hardware` is None where the text
    names none, `techniques` is None where it is silent about them, `precision` is not among them. `to` is the upper end
    of a printed range, `bound` says that the text prints a limit. `dataset` is what a quality was measured on, `scope`
    what the figure is restricted to where no other field can say it.
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
    scope: str | None = None
    batch_size: int | None = Field(None, gt=0)
    size: int | None = Field(None, gt=0)
    image_size: int | None = Field(None, gt=0)
    prompt_tokens: int | None = Field(None, gt=0)
    sequence: int | None = Field(None, gt=0)
    heads: int | None = Field(None, gt=0)
    head_dim: int | None = Field(None, gt=0)
    causal: bool | None = None
    dataset: str | None = None
    metric: str
    value: float = Field(gt=0)
    to: float | None = Field(None, gt=0)
    bound: Literal["at least", "at most"] | None = None
    unit: str
    ratio_of: tuple[str, str] | None = None
    saving_of: tuple[str, str] | None = None
    product_of: tuple[str, ...] = ()
    series: tuple[str, ...] = ()
    rate_of: str | None = None
    power_of: str | None = None

    @property
    def quantity(self) -> float:
        """The figure in its metric's own unit; of a range, its lower end."""
        return self.value * UNITS[self.unit]

    @property
    def subject(self) -> tuple[object, ...]:
        """The subject of the figure: equal for two claims about the same thing."""
        return (
            self.metric,
            self.hardware,
            self.workload,
            self.model,
            self.precision,
            self.techniques,
            self.scope,
            self.batch_size,
            self.size,
            self.image_size,
            self.prompt_tokens,
            self.sequence,
            self.heads,
            self.head_dim,
            self.causal,
            self.dataset,
        )

    def over(self, quantity: float) -> float:
        """A measured quantity over the claimed one: over the nearest end of a range, 1 within it."""
        high = self.quantity if self.to is None else self.to * UNITS[self.unit]
        return quantity / min(max(quantity, self.quantity), high)

    @model_validator(mode="after")
    def _known_terms(self) -> Self:
        if self.unit not in UNITS:
            raise ValueError(f"{self.id}: unknown unit {self.unit!r}; the units are {', '.join(UNITS)}")
        if self.metric not in METRICS and self.metric not in CLAIM_METRICS:
            raise ValueError(f"{self.id}: unknown metric {self.metric!r}")
        if self.to is not None and self.to <= self.value:
            raise ValueError(f"{self.id}: the range from {self.value:g} to {self.to:g} is empty")
        return self


class NamedModel(Frozen):
    """A model that claims name and that is not a preset. `macs` are an image classifier's for one image."""

    name: str
    macs: float | None = Field(None, gt=0)
    source: str


class ThesisClaim(Frozen):
    """The project's founding claim, and the two machines that it compares."""

    sentence: str
    source: str
    smaller: str
    larger: str


class ComparedMachine(Frozen):
    """One machine of the founding comparison: the ids of the claims about it."""

    latency: str
    power: str
    efficiency: str
    price: str

    @property
    def claims(self) -> tuple[str, ...]:
        """All of them."""
        return (self.latency, self.power, self.efficiency, self.price)


class FoundingClaim(Frozen):
    """The founding comparison of a microcontroller and a GPU; `ratio` is the id of the claim that sums it up.

    `image_sizes` are the sides of images for which a prediction is made, the first of them that of the model's MACs.
    """

    sentence: str
    source: str
    smaller: ComparedMachine
    larger: ComparedMachine
    ratio: str
    image_sizes: tuple[int, ...] = Field(min_length=1)


class Book(Frozen):
    """All claims, and the models that they name."""

    claims: tuple[Claim, ...]
    models: tuple[NamedModel, ...]
    thesis: ThesisClaim
    founding: FoundingClaim | None = None

    def claim(self, claim_id: str) -> Claim:
        """Raises SpecError if there is no claim of that id."""
        for claim in self.claims:
            if claim.id == claim_id:
                return claim
        raise SpecError(f"There is no claim {claim_id!r} in the book; correct the relation that names it.")

    def macs_of(self, name: str | None) -> float | None:
        """The multiply-accumulates of an image classifier for one image; None for another model."""
        return next((model.macs for model in self.models if model.name == name), None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ids = [claim.id for claim in self.claims]
        if twice := {each for each in ids if ids.count(each) > 1}:
            raise ValueError(f"two claims have the same id: {', '.join(sorted(twice))}")
        known = {model.name for model in self.models} | PRESETS.keys()
        for claim in self.claims:
            if unknown := _relations(claim) - set(ids):
                raise ValueError(f"{claim.id} refers to unknown claims: {', '.join(sorted(unknown))}")
            if claim.model is not None and claim.model not in known:
                raise ValueError(f"{claim.id}: unknown model {claim.model!r}")
        if self.founding and (unknown := _compared(self.founding) - set(ids)):
            raise ValueError(f"founding refers to unknown claims: {', '.join(sorted(unknown))}")
        return self


def _relations(claim: Claim) -> set[str]:
    """The ids of the claims that one is made of."""
    pairs = (*(claim.ratio_of or ()), *(claim.saving_of or ()), *claim.product_of, *claim.series)
    return {*pairs, *(each for each in (claim.rate_of, claim.power_of) if each)}


def _compared(founding: FoundingClaim) -> set[str]:
    return {*founding.smaller.claims, *founding.larger.claims, founding.ratio}


@lru_cache(maxsize=1)
def baselines() -> Book:
    """The claims of all files of `book/`."""
    pages = sorted(files("optigpu.claims").joinpath("book").iterdir(), key=lambda page: page.name)
    return read_book(*(page.read_text(encoding="utf-8") for page in pages))


def read_book(*pages: str) -> Book:
    """The claims of TOML documents, one of which has the thesis; what was measured stands last.

    Raises pydantic's ValidationError if they are not consistent.
    """
    documents = [tomllib.loads(page) for page in pages]
    sections = [section for document in documents for section in document.get("text", ())]
    sections.sort(key=lambda section: section["status"] != Status.CLAIMED)
    return Book.model_validate(
        {
            "claims": [claim for section in sections for claim in _claims_of(section)],
            "models": [model for document in documents for model in document.get("model", ())],
            **{
                name: next((document[name] for document in documents if name in document), None)
                for name in ("thesis", "founding")
            },
        }
    )


def _claims_of(section: Document) -> list[Document]:
    """The claims of a text, each with the facts that hold for the whole text."""
    shared = {"text": section["name"], "source": section["source"], "status": section["status"]}
    return [{**shared, **section.get("defaults", {}), **claim} for claim in section["claim"]]
