"""The page at `/jobs/ID`: how far a job is, its variants as they finish, and what can be done with it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from fastapi import APIRouter, Response

from api.inputs import JobId
from api.pages.bars import Bar, bars
from api.pages.posted import SubmitterPosted
from api.pages.verdicts import Badge, badge
from api.pages.view import PageView, Plain, ReaderView
from api.posting import Posting
from optigpu.documents.result import Attribution, MetricSummary
from optigpu.documents.views import JobView, VariantView
from optigpu.job.estimate import spoken
from optigpu.report.brief import brief_grid, headline
from optigpu.report.formats import Grid
from optigpu.report.rows import Row, rows_of
from optigpu.store import events, jobs, results
from optigpu.store.keys import Scope
from optigpu.vocabulary import Document, JobState, VariantStatus, utc_now

router = APIRouter()
WIDTH = 110
"""Characters of the table beside its bars and verdicts: the columns of sizes and of quality fit."""
STATUS_KINDS = {
    VariantStatus.RUNNING: "warn",
    VariantStatus.FAILED: "bad",
    VariantStatus.UNSUPPORTED: "plain",
}


@dataclass(frozen=True)
class Line:
    """A variant, its cells in the columns of the terminal's short table, and its figure as a bar."""

    variant: VariantView
    row: Row
    cells: tuple[str, ...]
    bar: Bar | None
    badge: Badge


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
        found = _placed(job, results.of_job(session, job_id))
        is_operator = view.who is not None and view.who.may(Scope.ADMIN)
        printed = jobs.printed(session, job_id) if is_operator else {}
        rough = events.rough(session, job_id)
    attribution = _attribution(job, found, rough)
    grid = (
        brief_grid("", attribution, found, WIDTH)
        if attribution.metric
        else Grid("", (), ((),) * len(job.variants))
    )
    lines = _lines(job, attribution, found, grid)
    best = _best(attribution, lines)
    remaining_s = job.progress.remaining_s
    return view.page(
        "job.html",
        job=job,
        lines=lines,
        columns=grid.columns[1:],
        headline=headline([line.row for line in lines]) if job.attribution else None,
        best=best,
        as_good=_as_good(best, attribution.metric, lines),
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


def _placed(job: JobView, found: Sequence[Document]) -> list[Document]:
    """The results by the indexes of this job's variants: one that was measured before has that of its own job."""
    by_id = {result["id"]: result for result in found}
    return [
        {**result, "variant": {**result["variant"], "index": each.index}}
        for each in job.variants
        if (result := by_id.get(str(each.result_id)))
    ]


def _attribution(job: JobView, found: Sequence[Document], rough: Mapping[int, Document]) -> Attribution:
    """With a row for each variant, and the gains that are known; its metric is empty until a figure is known."""
    stored = job.attribution or {}
    known = {row["index"]: row for row in stored.get("rows", ())}
    shown = {"index", "role", "label", "status", "reason"}
    rows = [
        {**each.model_dump(include=shown), "rough": rough.get(each.index), **known.get(each.index, {})}
        for each in job.variants
    ]
    of_result = [result["variant"]["primary_metric"] for result in found]
    metric = next(iter([*of_result, *(each["metric"] for each in rough.values())]), stored.get("metric", ""))
    return Attribution.model_validate({**stored, "metric": metric, "rows": rows}, extra="ignore")


def _lines(job: JobView, attribution: Attribution, found: Sequence[Document], grid: Grid) -> list[Line]:
    """The variants in the order of the plan, their bars on one scale."""
    rows = rows_of(attribution, found)
    figures = {
        row.ended.index: MetricSummary.model_validate(row.metric(attribution.metric), extra="ignore")
        for row in rows
        if row.has_figure(attribution.metric)
    }
    drawn = dict(zip(figures, bars([*figures.values()]), strict=True))
    return [
        Line(variant, row, cells[1:], drawn.get(variant.index), _badge(row))
        for variant, row, cells in zip(job.variants, rows, grid.rows, strict=True)
    ]


def _badge(row: Row) -> Badge:
    if row.result is not None:
        return badge(row.result["verdict"]["reasons"], row.warnings)
    return Badge(STATUS_KINDS.get(row.ended.status, "plain"), row.ended.status.value)


def _best(attribution: Attribution, lines: Sequence[Line]) -> Line | None:
    """The fastest valid one, once the job has ended; of a single variant that says nothing."""
    found = (line for line in lines if line.variant.index == attribution.best and len(lines) > 1)
    return next((line for line in found if line.row.valid), None)


def _as_good(best: Line | None, metric: str, lines: Sequence[Line]) -> list[str]:
    """The valid variants whose intervals overlap with that of the best one, which cannot be told apart from it."""
    if best is None or (of_best := _interval(best, metric)) is None:
        return []
    each = ((line, _interval(line, metric)) for line in lines if line is not best and line.row.valid)
    return [line.variant.label for line, ci in each if ci and ci[0] <= of_best[1] and ci[1] >= of_best[0]]


def _interval(line: Line, metric: str) -> tuple[float, float] | None:
    return (line.row.metric(metric) or {}).get("ci")


def _steps(job: JobView) -> tuple[tuple[str, str], ...]:
    """The phases of a job: each is done, is now, or is to come."""
    at = {JobState.QUEUED: 0, JobState.RUNNING: 1}.get(job.state, 2)
    last = job.state.value if job.state.is_final else "ended"
    marks = ["done" if number < at or job.state.is_final else "to come" for number in range(3)]
    if not job.state.is_final:
        marks[at] = "now"
    return tuple(zip(("queued", "running", last), marks, strict=True))
