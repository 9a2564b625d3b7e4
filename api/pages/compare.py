"""The page at `/compare`: results beside the first of them, with intervals, decisions and what differs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from api.inputs import Uuid
from api.pages.view import Asked, ReaderView
from api.problems import ProblemError
from optigpu.documents.versions import current
from optigpu.documents.views import Comparison, Decision
from optigpu.report.leaderboard import change_text
from optigpu.report.numbers import short
from optigpu.store import results
from optigpu.vocabulary import Document

router = APIRouter()
MOST = 6
KINDS = {
    Decision.BETTER: "good",
    Decision.WORSE: "bad",
    Decision.EQUIVALENT: "plain",
    Decision.UNDECIDED: "warn",
}


class CompareAsked(Asked):
    """Which results. The first one is what the others are relative to."""

    result: Annotated[
        Annotated[tuple[Uuid, ...], Field(max_length=MOST)], Query(description="The ids of results.")
    ] = ()


@dataclass(frozen=True)
class Cell:
    """A result's value of a metric, its change against the first result, and what is decided about it."""

    value: str
    change: str = ""
    decision: str = ""
    kind: str = "plain"
    why: str = ""


@router.get("/compare")
def read_comparison(view: ReaderView, asked: Annotated[CompareAsked, Query()]) -> Response:
    """Different workloads and hardware are compared too; notes then say what differs."""
    ids = list(dict.fromkeys(asked.result))
    with view.service.database.read() as session:
        documents = [current(results.get(session, each)) for each in ids]
    comparisons = [_compared(documents[0], each) for each in documents[1:]]
    notes = dict.fromkeys(note for each in comparisons for note in each.notes)
    return view.page(
        "compare.html",
        ids=ids,
        most=MOST,
        documents=documents,
        metrics=list(_metrics(documents, comparisons)) if comparisons else [],
        specs=list(_specs(documents)),
        notes=tuple(notes),
    )


def _compared(baseline: Document, candidate: Document) -> Comparison:
    from optigpu.statistics.compare import NotComparableError, compare  # here, because it loads numpy

    try:
        return compare(baseline, candidate, anyway=True)
    except NotComparableError as error:
        raise ProblemError(409, str(error)) from None


def _metrics(
    documents: Sequence[Document], comparisons: Sequence[Comparison]
) -> Iterator[tuple[str, list[Cell]]]:
    """A row for each metric that the first result has, the primary one first."""
    for name, metric in comparisons[0].metrics.items():
        if any(_value(each, name) is not None for each in documents):
            yield name, [Cell(short(metric.baseline)), *(_cell(each, name) for each in comparisons)]


def _value(document: Document, name: str) -> float | None:
    value: float | None = (document["metrics"].get(name) or {}).get("value")
    return value


def _cell(comparison: Comparison, name: str) -> Cell:
    metric = comparison.metrics.get(name)
    if metric is None:
        return Cell(short(None))
    decision = metric.decision
    return Cell(
        value=short(metric.candidate),
        change=change_text(metric) if metric.candidate is not None else "",
        decision=str(decision) if decision else "",
        kind=KINDS.get(decision, "plain") if decision else "plain",
        why=metric.reason or "",
    )


def _specs(documents: Sequence[Document]) -> Iterator[tuple[str, list[str], bool]]:
    """Each field of what was measured and where, and whether it differs."""
    sides = [_leaves(_asked(each)) for each in documents]
    for name in dict.fromkeys(name for side in sides for name in side):
        values = [side.get(name, "-") for side in sides]
        yield name, values, len(set(values)) > 1


def _asked(document: Document) -> Document:
    variant, environment = document["variant"], document["environment"]
    return {
        "stack": variant["label"],
        "backend": variant["backend"],
        "model": variant["model"],
        "workload": variant["workload"],
        "device": variant["device"],
        "hardware": environment["hardware_class"],
        "driver": environment.get("driver"),
        "os": environment.get("os"),
        "software": environment.get("software", {}),
        "variables": environment.get("variables", {}),
        "git revision": environment.get("git_revision"),
        "seed": document["seed"],
        "measured at": document["created_at"],
    }


def _leaves(document: Document, path: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{path}{name}.")
        elif value is not None:
            found[f"{path}{name}"] = str(value)
    return found
