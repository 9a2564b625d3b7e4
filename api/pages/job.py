"""The page at `/jobs/ID`: how far a job is, its variants as they finish, and what can be done with it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from fastapi import APIRouter, Response

from api.pages.bars import Bar, FigureText, bars, figure_text
from api.pages.posted import SubmitterPosted
from api.pages.verdicts import Badge, badge
from api.pages.view import PageView, Plain, ReaderView
from api.parameters import JobId
from api.posting import Posting
from optigpu.documents.views import JobView, VariantView
from optigpu.job.estimate import spoken
from optigpu.report.numbers import NOT_VALID
from optigpu.store import events, jobs, results
from optigpu.store.keys import Scope
from optigpu.store.results import PrimaryFigure
from optigpu.vocabulary import Document, JobState, VariantStatus, utc_now

router = APIRouter()
STATUS_KINDS = {
    VariantStatus.RUNNING: "warn",
    VariantStatus.FAILED: "bad",
    VariantStatus.UNSUPPORTED: "plain",
}


@dataclass(frozen=True)
class Line:
    """A variant, its figure where it has one, and what it gained where the job has ended."""

    variant: VariantView
    figure: PrimaryFigure | None
    text: FigureText
    bar: Bar | None
    badge: Badge
    gain: str


@router.get("/jobs/{id}")
def read_job(job_id: JobId, view: ReaderView, _: Plain) -> Response:
    """Everything that changes is in elements with `data-live`, which the script replaces."""
    return _page(view, job_id)


@router.post("/jobs/{id}/cancel")
def cancel_job(job_id: JobId, posted: SubmitterPosted) -> Response:
    """As the JSON API cancels."""
    Posting(posted.service, posted.who).cancel(job_id)
    return posted.view.sent_to(f"/jobs/{job_id}")


@router.post("/jobs/{id}/retry")
def retry_job(job_id: JobId, posted: SubmitterPosted) -> Response:
    """Puts a parked job back."""
    Posting(posted.service, posted.who).retry(job_id)
    return posted.view.sent_to(f"/jobs/{job_id}")


def _page(view: PageView, job_id: str) -> Response:
    with view.service.database.read() as session:
        newest = events.head(session, job_id).sequence
        job = jobs.get(session, job_id, lease_s=view.service.settings.lease_s)
        figures = results.primary_figures(session, job_id)
        is_operator = view.who is not None and view.who.may(Scope.ADMIN)
        printed = jobs.printed(session, job_id) if is_operator else {}
    lines = _lines(job, figures)
    remaining_s = job.progress.remaining_s
    return view.page(
        "job.html",
        job=job,
        lines=lines,
        metric=next((figure.metric for figure in figures.values()), None),
        best=_best(job, lines),
        as_good=_as_good(_best(job, lines), lines),
        newest=newest,
        left=spoken(remaining_s) if remaining_s else None,
        ends_at=utc_now() + timedelta(seconds=remaining_s) if remaining_s else None,
        steps=_steps(job),
        printed=[
            (line.variant, printed[line.variant.index]) for line in lines if line.variant.index in printed
        ],
        spec=json.dumps(job.spec, indent=2, ensure_ascii=False),
        has_ladder=job.attribution is not None and len(lines) > 1,
    )


def _lines(job: JobView, figures: Mapping[int, PrimaryFigure]) -> list[Line]:
    """The variants in the order of the plan, their bars on one scale."""
    drawn = dict(zip(figures, bars([figure.summary for figure in figures.values()]), strict=True))
    gains = {row["index"]: row.get("speedup") for row in (job.attribution or {}).get("rows", ())}
    return [
        Line(
            variant=variant,
            figure=figures.get(variant.index),
            text=figure_text(figures[variant.index].summary if variant.index in figures else None),
            bar=drawn.get(variant.index),
            badge=_badge(variant, figures.get(variant.index)),
            gain=_gain(gains.get(variant.index)),
        )
        for variant in job.variants
    ]


def _badge(variant: VariantView, figure: PrimaryFigure | None) -> Badge:
    if figure is not None:
        return badge(figure.reasons, figure.warnings)
    return Badge(STATUS_KINDS.get(variant.status, "plain"), variant.status.value)


def _gain(speedup: Document | None) -> str:
    """`1.23x [1.20, 1.26]`, from an attribution as it was stored."""
    if not speedup:
        return ""
    interval = "" if not speedup.get("ci") else " [{:.2f}, {:.2f}]".format(*speedup["ci"])
    return f"{speedup['ratio']:.2f}x{interval}{NOT_VALID if speedup.get('reasons') else ''}"


def _best(job: JobView, lines: Sequence[Line]) -> Line | None:
    """The fastest valid one, once the job has ended; of a single variant that says nothing."""
    index = (job.attribution or {}).get("best")
    found = next((line for line in lines if line.variant.index == index and len(lines) > 1), None)
    return found if found and found.figure and not found.figure.reasons else None


def _as_good(best: Line | None, lines: Sequence[Line]) -> list[str]:
    """The valid variants whose intervals overlap with that of the best one, which cannot be told apart from it."""
    if best is None or best.figure is None or best.figure.summary.ci is None:
        return []
    low, high = best.figure.summary.ci
    others = [
        line for line in lines if line is not best and line.figure is not None and not line.figure.reasons
    ]
    overlapping = [
        line
        for line in others
        if line.figure
        and line.figure.summary.ci
        and line.figure.summary.ci[0] <= high
        and line.figure.summary.ci[1] >= low
    ]
    return [line.variant.label for line in overlapping]


def _steps(job: JobView) -> tuple[tuple[str, str], ...]:
    """The phases of a job: each is done, is now, or is to come."""
    at = {JobState.QUEUED: 0, JobState.RUNNING: 1}.get(job.state, 2)
    last = job.state.value if job.state.is_final else "ended"
    marks = ["done" if number < at or job.state.is_final else "to come" for number in range(3)]
    if not job.state.is_final:
        marks[at] = "now"
    return tuple(zip(("queued", "running", last), marks, strict=True))
