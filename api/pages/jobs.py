"""The pages of jobs: the form at `/jobs/new`, the newest ones at `/jobs`, and each at `/jobs/ID`.

The form follows from the request's schema, with the JSON and the command beside it. Its fields can be set by the
address: `?preset=first`, `?from=ID` of a result or a job, and each field by its name. A preset is a job to begin with.
The list says how each job ended, and why one waits that no worker can take; a job's page, how far it is, its variants
as they finish, and what can be done with it.
"""

import hashlib
import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

from anyio import from_thread
from fastapi import APIRouter, Depends, Query, Request, Response

from api.auth import require
from api.inputs import Cursor, JobId, PostedJob, any_parameters, job_of
from api.job_form import Errors, Values, document_of, errors_at, fields, job_form, values_of
from api.openapi import JOBS, Example
from api.pages.figures import Badge, Bar, badge, bars
from api.pages.view import Asked, PageView, Plain, ReaderPosted, ReaderView, SubmitterPosted
from api.problems import ProblemError, from_store
from api.routes.jobs import Posting
from api.routes.leaderboard import MODELS
from optigpu.documents.fields import WHOLE
from optigpu.documents.result import Attribution, MetricSummary
from optigpu.documents.views import JobView, VariantView
from optigpu.job.estimate import spoken
from optigpu.job.measured import replay_request
from optigpu.job.spec import Tag
from optigpu.report.formats import Grid
from optigpu.report.ladder import brief_grid, headline
from optigpu.report.rows import Row, rows_of
from optigpu.store import events, jobs, prospects, results, workers
from optigpu.store.database import Session
from optigpu.store.keys import Scope
from optigpu.vocabulary import (
    Document,
    JobState,
    NotFoundError,
    SpecError,
    StoreError,
    VariantStatus,
    is_id,
    utc_now,
)

router = APIRouter()
MAIN = ("workload", "model", "device", "plan", "stack")
"""The parts of a request that everybody looks at, in this order; the others are folded away."""
OWN = ("preset", "from", "export", "once", "ask")
"""Parameters that are no fields."""
FIRST_LOOK = Example(
    "A first look: what do bf16 and int8 buy for the small model that comes with OptiGPU, on this CPU?",
    {
        "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 32, "batch_size": 1},
        "model": "bundled:tiny",
        "device": "cpu",
        "plan": "ladder",
        "stack": [{"name": "bf16"}, {"name": "int8_weight_only"}],
        "measure": {"replicates": 1, "min_seconds": 1, "max_seconds": 4},
        "limits": {"wait_for_quiet_s": 5},
    },
)
BEST_STACK = Example(
    "Find the best stack: a search among four techniques for the fastest that stays close to fp32",
    {
        "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64, "batch_size": 1},
        "model": "bundled:tiny",
        "device": "cpu",
        "plan": "search",
        "stack": [
            {"name": "bf16"},
            {"name": "int8_weight_only"},
            {"name": "static_kv_cache"},
            {"name": "fused_gelu"},
        ],
        "measure": {"min_seconds": 2, "max_seconds": 10},
        "limits": {"max_kld": 0.05},
    },
)
PRESETS = {"first": FIRST_LOOK, "best": BEST_STACK, **JOBS}
"""By the names that addresses have."""


@dataclass
class Draft:
    """A form as it is filled in, and what the service says of it."""

    values: Values
    document: Document = field(default_factory=dict)
    errors: Errors = field(default_factory=dict)
    job: PostedJob | None = None

    def check(self) -> None:
        """Validates it as a POST does."""
        self.document = document_of(job_form(), self.values)
        try:
            self.job = job_of(self.document)
        except ProblemError as problem:
            self.errors |= errors_at(job_form(), self.document, problem.errors)


@router.get("/jobs/new", dependencies=[Depends(any_parameters)])
def ask_for_job(view: ReaderView, request: Request) -> Response:
    """The form, filled in as the address says."""
    given: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, []).append(value)
    with view.service.database.read() as session:
        draft = _draft(session, given)
    if draft.values:
        draft.check()
    return _form_page(view, draft)


@router.post("/jobs/new")
def take_job(posted: ReaderPosted) -> Response:
    """Looks at the job, or posts it: what is wrong stands at its field, in the words of the API."""
    draft = Draft(posted.values)
    draft.check()
    if posted.text("ask") != "post":
        return _form_page(posted.view, draft)
    if draft.errors:
        return _form_page(posted.view, draft, 422)
    assert draft.job is not None
    try:
        require(posted.who, Scope.SUBMIT)
        posting = Posting(posted.service, posted.who, posted.view.request.state.span)
        made = from_thread.run(posting.submit, draft.job.spec, _once(posted.text("once"), draft.document))
    except ProblemError as problem:
        draft.errors = {WHOLE: [problem.detail]}
        return _form_page(posted.view, draft, problem.status)
    posted.view.request.state.job_id = made.id
    return posted.view.sent_to(f"/jobs/{made.id}")


def _draft(session: Session, given: Mapping[str, list[str]]) -> Draft:
    """Each field that the address names takes precedence over the preset or the source."""
    parts = job_form()
    draft = Draft({})
    preset, source = (next(iter(given.get(name, ())), "") for name in ("preset", "from"))
    try:
        document = _source(session, source) if source else {}
    except (StoreError, SpecError) as error:
        reason = from_store(error).detail if isinstance(error, StoreError) else str(error)
        document, draft.errors = {}, {WHOLE: [reason]}
    if preset:
        known = PRESETS.get(preset)
        document = known.document if known else {}
        if known is None:
            draft.errors = {WHOLE: [f"There is no preset {preset!r}; there are {', '.join(PRESETS)}."]}
    names = {part.name for part in fields(parts)}
    strange = [name for name in given if name not in names and name not in OWN]
    if strange:
        draft.errors = {WHOLE: [f"The form has no field {strange[0]!r}; it was left out."]}
    draft.values = values_of(parts, document) | {name: given[name] for name in given if name in names}
    return draft


def _source(session: Session, source: str) -> Document:
    """The request that measures a result, or a job, again. Raises NotFoundError, and SpecError where none does."""
    if not is_id(source):
        raise NotFoundError(f"There is no result and no job {source[:100]!r}.")
    fresh = {"fresh": True}
    try:
        result = results.get(session, source.lower())
    except NotFoundError:
        return jobs.get(session, source.lower()).spec | fresh
    job_id = result.get("job_id")
    spec = jobs.get(session, job_id).spec if job_id else None
    return replay_request(result, spec, {}) | fresh


def _once(once: str, document: Document) -> str | None:
    """The idempotency key of one form with one content: sent twice it is one job, and changed it is another."""
    if not once:
        return None
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(f"{once[:100]}:{text}".encode("utf-8", "surrogatepass")).hexdigest()


def _form_page(view: PageView, draft: Draft, status: int = 200) -> Response:
    with view.service.database.read() as session:
        alive = workers.alive(session, view.service.settings.lease_s)
    text = json.dumps(draft.document, indent=2, ensure_ascii=False)
    return view.page(
        "jobs.html#new_job",
        status,
        main=sorted(
            (part for part in job_form() if part.label in MAIN), key=lambda part: MAIN.index(part.label)
        ),
        more=[part for part in job_form() if part.label not in MAIN],
        values=draft.values,
        errors=draft.errors,
        whole=WHOLE,
        preview=draft.job.preview() if draft.job else None,
        text=text,
        curl=_curl(str(view.request.base_url).rstrip("/"), text),
        presets=PRESETS,
        suggestions={"model": MODELS},
        once=next(iter(draft.values.get("once", ())), "") or secrets.token_urlsafe(16),
        serving=sorted({(worker.device.value, worker.hardware_class) for worker in alive}),
    )


def _curl(address: str, text: str) -> str:
    """The command that posts the same job."""
    lines = (
        f"curl -s {shlex.quote(f'{address}/v1/jobs')}",
        '-H "Authorization: Bearer $OPTIGPU_API_KEY"',
        "-H 'Content-Type: application/json'",
        f"-d {shlex.quote(text)}",
    )
    return " \\\n  ".join(lines)


SHOWN = 50


class JobsAsked(Asked):
    """Which jobs, and which page of their list."""

    state: JobState | None = None
    tag: Tag | None = None
    cursor: Cursor | None = None


@router.get("/jobs")
def read_jobs(view: ReaderView, asked: Annotated[JobsAsked, Query()]) -> Response:
    """The newest ones first."""
    with view.service.database.read() as session:
        page = jobs.list_(session, state=asked.state, tag=asked.tag, limit=SHOWN, cursor=asked.cursor)
        lease_s = view.service.settings.lease_s
        waiting = prospects.reasons(session, [job.id for job in page.jobs], lease_s)
    return view.page(
        "jobs.html#jobs", page=page, unserved=waiting, asked=asked, states=[state.value for state in JobState]
    )


TABLE_WIDTH = 110
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
    return _job_page(view, job_id)


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


def _job_page(view: PageView, job_id: str) -> Response:
    with view.service.database.read() as session:
        newest = events.head(session, job_id).sequence
        job = jobs.get(session, job_id, lease_s=view.service.settings.lease_s)
        found = _placed(job, results.of_job(session, job_id))
        is_operator = view.who is not None and view.who.may(Scope.ADMIN)
        printed = jobs.printed(session, job_id) if is_operator else {}
        rough = events.rough(session, job_id)
    attribution = _attribution(job, found, rough)
    grid = (
        brief_grid("", attribution, found, TABLE_WIDTH)
        if attribution.metric
        else Grid("", (), ((),) * len(job.variants))
    )
    lines = _lines(job, attribution, found, grid)
    best = _best(attribution, lines)
    remaining_s = job.progress.remaining_s
    return view.page(
        "jobs.html#job",
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
