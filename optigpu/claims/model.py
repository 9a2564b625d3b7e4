"""Claims: published figures as data, read from the files of `book/`, in the words that they use. The rules judge them,
and what they find is a Finding."""

import tomllib
from collections.abc import Callable
from decimal import Decimal
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from typing import Literal, Self

from pydantic import Field, model_validator

from optigpu.models.reference import PRESETS
from optigpu.vocabulary import COUNTED_METRICS, METRICS, Frozen, SpecError

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
    "GiB": 2.0**30,
    "W": 1.0,
    "x": 1.0,
    "1": 1.0,
    "%": 0.01,
    "% lost": 1.0,
    "INR": 1.0,
}
"""Printed units, as multiples of the metric's own unit. `% lost` is that of accuracy_loss_percent."""
BINARY_UNITS: dict[str, float] = {"GB": 2.0**30, "MB": 2.0**20, "GiB": 2.0**30}
"""The other meaning of printed bytes: PyTorch's counters are often divided by powers of 1024 and called GB."""

Precision = Literal["fp32", "fp16", "bf16", "int8", "llm_int8", "int4", "nf4", "gptq", "awq", "q4_k_m"]
Workload = Literal["matmul", "generate", "kv_cache", "classify", "attention", "inference", "train_step"]
"""Kinds of workloads, and inference of which the text says no more."""

CLAIM_METRICS: dict[str, str] = {
    "speedup": "times as fast",
    "memory_ratio": "times less memory",
    "growth_exponent": "time grows with this power of the size",
    "overhead_s": "fixed time that is added to each run",
    "images_per_j": "classified images per joule",
    "peak_bytes_saved": "share of the peak memory that is saved",
    "weight_bytes_saved": "share of the bytes of weights that is saved",
    "latency_saved": "share of the time that is saved",
    "accuracy_kept": "share of the accuracy that is kept",
    "peak_flop_share": "share of the published peak rate of operations",
    "peak_bandwidth_share": "share of the published peak memory bandwidth",
    "throughput_gained": "share of the throughput that is gained",
    "batch_scaling": "times the largest batch that fits",
    "efficiency_ratio": "times the work per energy",
    "price": "price of the hardware",
}
"""Metrics that only claims have, and what each counts."""

QUALITY_METRICS = frozenset({"accuracy", "accuracy_loss_percent", "perplexity", "perplexity_delta"})
"""Metrics of a text or a test. Two figures compare only if both say which, and both are of trained weights."""
SAME_EVERYWHERE = COUNTED_METRICS | QUALITY_METRICS
"""Metrics that a model and its stack decide, whatever the machine and the workload."""
ON_ANY_HARDWARE = SAME_EVERYWHERE | {"peak_bytes"}
"""Metrics that are compared whatever hardware the claim names. What a GPU allocates depends on the workload alone."""
BYTES = frozenset(name for name, metric in METRICS.items() if metric.unit == "B")
"""Metrics in bytes; a claim of one needs to name no hardware."""
NEEDS_HARDWARE = frozenset(
    {
        "tflops", "tokens_per_s", "images_per_s", "trained_tokens_per_s", "latency_s", "tpot_s", "step_s", "compile_s",
        "speedup", "throughput_gained", "latency_saved", "power_w", "images_per_j", "gpu_utilization",
        "peak_flop_share", "peak_bandwidth_share",
    }
)  # fmt: skip
"""Metrics that depend on the machine. Bytes and quality do not; growth and ratios depend on other claims."""


class Status(StrEnum):
    """Where a figure comes from."""

    CLAIMED = "claimed"
    MEASURED_BY_OTHERS = "measured by others"
    MEASURED_HERE = "measured here"


_SUBJECT = (
    "metric", "hardware", "workload", "model", "precision", "techniques", "scope", "batch_size", "size", "image_size",
    "prompt_tokens", "sequence", "heads", "head_dim", "causal", "dataset",
)  # fmt: skip


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
        return tuple(getattr(self, name) for name in _SUBJECT)

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

    @property
    def claims(self) -> tuple[str, ...]:
        both = (self.smaller, self.larger)
        return (*(each for one in both for each in one.model_dump().values()), self.ratio)


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
            made_of = {*(claim.ratio_of or ()), *(claim.saving_of or ()), *claim.product_of, *claim.series}
            made_of |= {each for each in (claim.rate_of, claim.power_of) if each}
            if unknown := made_of - set(ids):
                raise ValueError(f"{claim.id} refers to unknown claims: {', '.join(sorted(unknown))}")
            if claim.model is not None and claim.model not in known:
                raise ValueError(f"{claim.id}: unknown model {claim.model!r}")
        if self.founding and (unknown := set(self.founding.claims) - set(ids)):
            raise ValueError(f"founding refers to unknown claims: {', '.join(sorted(unknown))}")
        return self


@lru_cache(maxsize=1)
def baselines() -> Book:
    """The claims of all files of `book/`."""
    pages = sorted(files("optigpu.claims").joinpath("book").iterdir(), key=lambda page: page.name)
    return read_book(*(page.read_text(encoding="utf-8") for page in pages))


def read_book(*pages: str) -> Book:
    """The claims of TOML documents, one of which has the thesis; what was measured stands last. Raises pydantic's
    ValidationError if they are not consistent."""
    documents = [tomllib.loads(page) for page in pages]
    sections = [section for document in documents for section in document.get("text", ())]
    sections.sort(key=lambda section: section["status"] != Status.CLAIMED)
    claims = []
    for section in sections:  # each claim with the facts that hold for the whole text
        shared = {"text": section["name"], "source": section["source"], "status": section["status"]}
        claims += [{**shared, **section.get("defaults", {}), **claim} for claim in section["claim"]]
    return Book.model_validate(
        {
            "claims": claims,
            "models": [model for document in documents for model in document.get("model", ())],
            **{
                name: next((document[name] for document in documents if name in document), None)
                for name in ("thesis", "founding")
            },
        }
    )


class Plausibility(StrEnum):
    """`plausible` passed the rules that apply; `doubtful` contradicts itself or cannot be checked, though no limit
    forbids the figure; `implausible` breaks arithmetic or a limit of the hardware; `unchecked`: no rule applies.
    """

    UNCHECKED = "unchecked"
    PLAUSIBLE = "plausible"
    DOUBTFUL = "doubtful"
    IMPLAUSIBLE = "implausible"


class RuleFinding(Frozen):
    """The finding of one rule: the arithmetic in a sentence, and its two numbers in the sentence's unit.

    `implied` is what the claim's own figures amount to, `limit` what it was held against.
    """

    rule: str
    plausibility: Plausibility
    sentence: str
    implied: float | None = None
    limit: float | None = None


def checked(rule: str, off: bool, sentence: str, implied: float, limit: float) -> RuleFinding:
    """The finding of a rule that forbids a claim where it is `off`."""
    plausibility = Plausibility.IMPLAUSIBLE if off else Plausibility.PLAUSIBLE
    return RuleFinding(rule=rule, plausibility=plausibility, sentence=sentence, implied=implied, limit=limit)


Rule = Callable[[Claim, Book], RuleFinding | None]
"""A pure function; None means that the rule does not apply to the claim."""


def rounded(claim: Claim) -> tuple[float, float]:
    """The smallest and the largest quantity that round to the printed figure."""
    text = repr(claim.value).removesuffix(".0")
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    return (claim.value - half) * UNITS[claim.unit], (claim.value + half) * UNITS[claim.unit]


def plain(number: float, digits: int = 3) -> str:
    """A number rounded to significant digits, never with an exponent: 1234.5 is 1,230."""
    return format(Decimal(f"{number:.{digits}g}"), ",f")


def percent(share: float) -> str:
    """A share in percent: whole numbers from 10 on, one digit below."""
    return f"{plain(100 * share, 1)}%" if share < 0.095 else f"{100 * share:,.0f}%"


def printed(claim: Claim) -> str:
    """The figure as it was printed: `148 tok/s`, `at least 98%`, `1.3 to 1.8x`."""
    to = "" if claim.to is None else f" to {plain(claim.to, 12)}"
    space = "" if claim.unit.startswith(("%", "x")) else " "
    return f"{claim.bound + ' ' if claim.bound else ''}{plain(claim.value, 12)}{to}{space}{claim.unit}"
