"""The page at `/jobs/new`: a form that follows from the request's schema, with the JSON and the command beside it.

Its fields can be set by the address: `?preset=first`, `?from=ID` of a result or a job, and each field by its name.
A preset is a job to begin with.
"""

import hashlib
import json
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from anyio import from_thread
from fastapi import APIRouter, Depends, Request, Response

from api.auth import require
from api.filters import MODELS
from api.inputs import PostedJob, any_parameters, job_of
from api.job_form import Errors, Values, document_of, errors_at, fields, job_form, values_of
from api.openapi import JOBS, Example
from api.pages.posted import ReaderPosted
from api.pages.view import PageView, ReaderView
from api.posting import Posting
from api.problems import ProblemError, from_store
from optigpu.documents.fields import WHOLE
from optigpu.job.measured import replay_request
from optigpu.store import jobs, results, workers
from optigpu.store.database import Session
from optigpu.store.keys import Scope
from optigpu.vocabulary import Document, NotFoundError, SpecError, StoreError, is_id

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
    return _page(view, draft)


@router.post("/jobs/new")
def take_job(posted: ReaderPosted) -> Response:
    """Looks at the job, or posts it: what is wrong stands at its field, in the words of the API."""
    draft = Draft(posted.values)
    draft.check()
    if posted.text("ask") != "post":
        return _page(posted.view, draft)
    if draft.errors:
        return _page(posted.view, draft, 422)
    assert draft.job is not None
    try:
        require(posted.who, Scope.SUBMIT)
        posting = Posting(posted.service, posted.who, posted.view.request.state.span)
        made = from_thread.run(posting.submit, draft.job.spec, _once(posted.text("once"), draft.document))
    except ProblemError as problem:
        draft.errors = {WHOLE: [problem.detail]}
        return _page(posted.view, draft, problem.status)
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


def _page(view: PageView, draft: Draft, status: int = 200) -> Response:
    with view.service.database.read() as session:
        alive = workers.alive(session, view.service.settings.lease_s)
    text = json.dumps(draft.document, indent=2, ensure_ascii=False)
    return view.page(
        "new_job.html",
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
