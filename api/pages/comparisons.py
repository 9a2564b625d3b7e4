"""The pages where figures stand beside others.

`/compare` shows results beside the first of them, with intervals, decisions and what differs; `/history` one variant on
one class of hardware over time, and what changed with its level; `/ladder/{id}` of a job what each technique bought,
alone, added and left out; `/claims` published figures, what arithmetic says of them, and what was measured here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from api.charts import Figure, figure
from api.inputs import Cursor, JobId, Uuid
from api.pages.view import Asked, Plain, ReaderView
from api.problems import ProblemError
from api.routes.leaderboard import MetricName
from optigpu.claims.matching import Measured, from_leaderboard, from_results, says_too_little
from optigpu.claims.model import Book, Plausibility, baselines
from optigpu.documents.queries import LeaderboardQuery, Text
from optigpu.documents.result import Attribution
from optigpu.documents.versions import current
from optigpu.documents.views import Comparison, Decision, LeaderboardRow
from optigpu.report.catalog import job_title
from optigpu.report.charts import CHARTS, Report
from optigpu.report.claims import claim_rows, measured_text
from optigpu.report.claims import figure as printed
from optigpu.report.formats import short
from optigpu.report.ladder import ladder_grid
from optigpu.report.leaderboard import change_text
from optigpu.store import jobs, leaderboard, results
from optigpu.store.database import Session
from optigpu.vocabulary import METRICS, Document, SpecError

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
        "comparisons.html#compare",
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


ROWS = 40


class HistoryAsked(Asked):
    """Whose history, by any result of it."""

    result: Annotated[Uuid | None, Query(description="The id of a result.")] = None
    metric: MetricName | None = None
    cursor: Cursor | None = None


@router.get("/history")
def read_history(view: ReaderView, asked: Annotated[HistoryAsked, Query()]) -> Response:
    """Without a result, the variants that were measured more than once."""
    if asked.result is None:
        return _choice(view)
    from optigpu.statistics.changes import with_changes  # here, because it loads numpy

    metric = asked.metric.value if asked.metric else None
    with view.service.database.read() as session:
        found = results.history_of(session, asked.result, metric=metric, cursor=asked.cursor)
    known, root = with_changes(found), view.look.root
    return view.page(
        "comparisons.html#history",
        history=known,
        chart=figure(known, id_prefix="history", link=lambda source: f"{root}/results/{source}"),
        worse=[change for change in known.changes if not change.improved],
        asked=asked,
        metrics=list(MetricName),
    )


def _choice(view: ReaderView) -> Response:
    with view.service.database.read() as session:
        boards = leaderboard.query(session, LeaderboardQuery(limit=ROWS)).boards
    rows = [(board, row) for board in boards for row in board.rows if row.earlier]
    return view.page("comparisons.html#histories", rows=rows)


@router.get("/ladder/{id}")
def read_ladder(view: ReaderView, job_id: JobId, _: Plain) -> Response:
    """A job that is no ladder has its table alone."""
    with view.service.database.read() as session:
        job = jobs.get(session, job_id)
        found = results.of_job(session, job_id)
    attribution = Attribution.model_validate(job.attribution) if job.attribution and found else None
    title = job_title(job.spec, found)
    chart, why_none = None, "The job has no attribution yet: it has not ended, or nothing of it was measured."
    if attribution is not None:
        chart, why_none = _chart(Report(title, found, attribution), view.look.root)
    return view.page(
        "comparisons.html#ladder",
        job=job,
        title=title,
        chart=chart,
        why_none=why_none,
        grid=ladder_grid(title, attribution, found) if attribution else None,
        results=found,
    )


def _chart(report: Report, root: str) -> tuple[Figure | None, str]:
    """The waterfall; or why there is none."""
    try:
        (panel,) = CHARTS["waterfall"](report).panels
    except SpecError:
        return (
            None,
            "No rung of a ladder has a speedup, so there is no waterfall; the table has what was measured.",
        )
    return figure(panel, id_prefix="ladder", link=lambda source: f"{root}/results/{source}"), ""


BEST_ROWS = 20
PLAUSIBILITIES = {"plausible": "good", "doubtful": "warn", "implausible": "bad", "unchecked": "plain"}


class ClaimsAsked(Asked):
    """Which claims."""

    verdict: Annotated[Plausibility | None, Query(description="What arithmetic says of them.")] = None
    about: Annotated[Text | None, Query(description="Part of the text, the hardware or the model.")] = None
    measured: Annotated[bool, Query(description="Only those of what was measured here.")] = False


@router.get("/claims")
def read_claims(view: ReaderView, asked: Annotated[ClaimsAsked, Query()]) -> Response:
    """Beside the best rows of the newest boards on each class of hardware."""
    book = baselines()
    with view.service.database.read() as session:
        measured = _measured(session, book)
    rows = claim_rows(book, measured)
    part = (asked.about or "").lower()
    shown = [
        (row, printed(row.claim), measured_text(row))
        for row in rows
        if asked.verdict in (None, row.judgement.plausibility)
        and (row.measured is not None or not asked.measured)
        and part in f"{row.claim.text} {row.claim.what} {row.claim.hardware} {row.claim.model}".lower()
    ]
    counts = {each.value: sum(row.judgement.plausibility is each for row in rows) for each in Plausibility}
    return view.page(
        "comparisons.html#claims",
        asked=asked,
        claims=shown,
        counts=counts,
        kinds=PLAUSIBILITIES,
        every=len(rows),
    )


def _measured(session: Session, book: Book) -> list[Measured]:
    metrics = dict.fromkeys(claim.metric for claim in book.claims if claim.metric in METRICS)
    rows = [row for metric in metrics for row in _rows(session, metric)]
    whole = dict.fromkeys(row.result_id for row in rows if says_too_little(row))
    return from_leaderboard(rows) + from_results(results.get(session, each) for each in whole)


def _rows(session: Session, metric: str) -> list[LeaderboardRow]:
    page = leaderboard.query(session, LeaderboardQuery(metric=metric, best=True, limit=BEST_ROWS))
    return [row for board in page.boards for row in board.rows]
