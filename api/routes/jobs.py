"""Jobs: look at one before it is posted, submit, get, list, follow, cancel, put back, withdraw, import; and the JSON
schemas of what a job can contain, from the models that validate it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.concurrency import run_in_threadpool

from api.auth import Administrator, Reader, Submitter
from api.gate import Caller
from api.inputs import (
    Cursor,
    Id,
    JobBody,
    JobId,
    JobPreview,
    Limit,
    PostedRun,
    Withdrawing,
    posted_job,
    run_body,
    strict_document,
)
from api.openapi import GUARDED, OTHERS, POSTED_JOB, posted, problems, schema_of
from api.problems import ProblemError
from api.service import Service, ServiceDep
from optigpu.backends import BACKENDS
from optigpu.documents.administration import AuditAction
from optigpu.documents.others import OthersFile, OthersView
from optigpu.documents.queries import PRINTABLE
from optigpu.documents.views import EventView, JobPage, JobSummary, JobView, WithdrawalView, Withdrawn
from optigpu.job.spec import JobSpec, Tag
from optigpu.store import audit, events, jobs, others, outcomes, queue, withdrawals
from optigpu.store.jobs import Submitted
from optigpu.store.keys import Scope
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import Frozen, JobState
from optigpu.workloads import WORKLOADS
from optigpu.workloads.kernel import code_refusal


@dataclass(frozen=True)
class Posting:
    """What one caller does with jobs, however the request came: as JSON, by a form, or from a program that talks.

    `span` is the address of the request's span, if it is traced.
    """

    service: Service
    who: Caller
    span: str | None = None

    async def submit(self, job: bytes | JobSpec, idempotency_key: str | None = None) -> JobView:
        """Stores the job, or that of a request's body, and rings for a worker. Raises ProblemError for one that is
        invalid or that the caller may not post, ConflictError for an idempotency key of another job."""
        submitted = await run_in_threadpool(self._submit, job, idempotency_key)
        if submitted.created:
            self._ring(submitted.job)
        return submitted.job

    def _submit(self, job: bytes | JobSpec, idempotency_key: str | None) -> Submitted:
        spec = job if isinstance(job, JobSpec) else posted_job(job).spec
        if spec.priority > 0 and not self.who.may(Scope.ADMIN):
            raise ProblemError(
                403, "A priority above 0 needs a key with the scope admin; leave priority out."
            )
        if refusal := code_refusal(spec.workload):
            raise ProblemError(403, refusal)
        # Idempotency keys of different callers are kept apart.
        key = None if idempotency_key is None else f"{self.who.id}:{idempotency_key}"
        lease_s = self.service.settings.lease_s
        with self.service.database.write() as session:
            submitted = jobs.submit(session, spec, owner=self.who.id, idempotency_key=key, lease_s=lease_s)
            if submitted.created:
                posted = submitted.job
                audit.write(
                    session, self.who.actor, AuditAction.JOB_SUBMITTED, posted.id, at=posted.created_at
                )
                if self.span:
                    queue.keep(session, posted.id, self.span)
        return submitted

    def retry(self, job_id: str) -> JobView:
        """Puts a parked job back and rings for a worker. Raises NotFoundError, ConflictError."""
        with self.service.database.write() as session:
            before = jobs.get(session, job_id).state
            job = jobs.retry(session, job_id, lease_s=self.service.settings.lease_s)
            if job.state is not before:
                audit.write(session, self.who.actor, AuditAction.JOB_RETRIED, job_id)
        self._ring(job)
        return job

    def cancel(self, job_id: str) -> JobView:
        """Cancels the job; one that has ended stays as it is. Raises NotFoundError."""
        with self.service.database.write() as session:
            before = jobs.get(session, job_id).cancel_requested_at
            job = jobs.request_cancel(session, job_id, lease_s=self.service.settings.lease_s)
            if job.cancel_requested_at != before:
                audit.write(session, self.who.actor, AuditAction.JOB_CANCELLED, job_id)
        return job

    def _ring(self, job: JobView) -> None:
        """A job for a scheduler is its launcher's, which looks for itself."""
        if job.state is JobState.QUEUED and job.spec.get("via") is None:
            self.service.doorbell.ring(job.id, job.device)


Job = TypeVar("Job", bound=JobSummary)

router = APIRouter(prefix="/v1", tags=["jobs"], responses=GUARDED)

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=PRINTABLE,
        description="A second request with the same key and body returns the job that the first one created.",
    ),
]


class JobFilter(Frozen):
    """Which jobs to list."""

    state: JobState | None = None
    tag: Tag | None = None
    parked: bool | None = None
    limit: Limit = 50
    cursor: Cursor | None = None


ACCEPTED: dict[str, object] = {
    "description": "The job is stored and waits for a worker.",
    "headers": {"Location": {"description": "Where the job is.", "schema": {"type": "string"}}},
}


@router.post(
    "/jobs",
    status_code=202,
    operation_id="submit_job",
    summary="Submit a job",
    response_model=JobView,
    responses=problems(408, 409, 413, 415) | {202: ACCEPTED},
    openapi_extra=POSTED_JOB,
)
async def submit_job(
    body: JobBody,
    request: Request,
    service: ServiceDep,
    who: Submitter,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Validates the job and stores it; a worker that can run it picks it up. `unserved` says why none can, if so. A job
    whose very same measurement was made before has ended with its results, unless it is `fresh`. This answer does not
    have its place in the queue, nor when it will begin: get the job for them."""
    posted = Posting(service, who, request.state.span)
    job = linked(await posted.submit(body, idempotency_key), service)
    request.state.job_id = job.id
    # Sent as it is: it need not be validated again.
    return Response(
        job.model_dump_json(), 202, headers={"Location": job.links["self"]}, media_type="application/json"
    )


@router.get("/jobs", operation_id="list_jobs", summary="List jobs, the newest first")
def list_jobs(service: ServiceDep, _: Reader, wanted: Annotated[JobFilter, Query()]) -> JobPage:
    """A page of jobs; `next_cursor` leads to the one after it."""
    with service.database.read() as session:
        page = jobs.list_(
            session,
            state=wanted.state,
            tag=wanted.tag,
            parked=wanted.parked,
            limit=wanted.limit,
            cursor=wanted.cursor,
        )
    return page.model_copy(update={"jobs": tuple(linked(job, service) for job in page.jobs)})


@router.get("/jobs/{id}", operation_id="get_job", summary="Get a job", responses=problems(404, 410))
def get_job(job_id: JobId, service: ServiceDep, _: Reader) -> JobView:
    """State, progress, queue position, attempts and variants; and while no live worker can take the job, why."""
    with service.database.read() as session:
        return linked(jobs.get(session, job_id, lease_s=service.settings.lease_s), service)


@router.post(
    "/jobs/{id}/cancel", operation_id="cancel_job", summary="Cancel a job", responses=problems(404, 410)
)
def cancel_job(job_id: JobId, service: ServiceDep, who: Submitter) -> JobView:
    """A queued job is cancelled at once, a running one when its processes have ended. An ended job stays as it is."""
    return linked(Posting(service, who).cancel(job_id), service)


@router.post(
    "/jobs/{id}/retry",
    operation_id="retry_job",
    summary="Put a parked job back",
    responses=problems(404, 409, 410),
)
def retry_job(job_id: JobId, service: ServiceDep, who: Submitter) -> JobView:
    """A parked job waits for a worker again, and what was measured of it is kept. A job that waits or runs stays as it
    is; another that has ended is refused."""
    return linked(Posting(service, who).retry(job_id), service)


@router.delete(
    "/jobs/{id}", operation_id="withdraw_job", summary="Withdraw a job", responses=problems(404, 409)
)
def withdraw_job(
    job_id: JobId, service: ServiceDep, who: Administrator, asked: Annotated[Withdrawing, Query()]
) -> WithdrawalView:
    """Removes a job with all of its results, and keeps who withdrew it, when and why; reading it answers 410 from then
    on. A running job is refused: cancel it first. Withdrawing it again changes nothing."""
    with service.database.write() as session:
        known = withdrawals.is_withdrawn(session, Withdrawn.JOB, job_id)
        withdrawn = withdrawals.withdraw_job(session, job_id, asked.by(who))
        if not known:
            audit.write(session, who.actor, AuditAction.JOB_WITHDRAWN, job_id, {"reason": asked.reason})
    return withdrawn


def linked(job: Job, service: Service) -> Job:
    """The job with its links."""
    place = f"{service.settings.prefix}/v1/jobs/{job.id}"
    links = {name: f"{place}/{name}" for name in ("events", "results", "cancel", "retry")}
    return job.model_copy(update={"links": {"self": place} | links})


@router.post(
    "/preview",
    operation_id="preview_job",
    summary="Look at a job without posting it",
    responses=problems(408, 413, 415),
    openapi_extra=POSTED_JOB,
)
def preview_job(body: JobBody, _: Submitter) -> JobPreview:
    """Validates the job as a POST does, and says which variants it has and about how long they take. Nothing is
    stored."""
    return posted_job(body).preview()


@router.post(
    "/imports",
    status_code=201,
    operation_id="import_run",
    summary="Import a run",
    responses=problems(408, 409, 413, 415),
)
def import_run(
    posted: PostedRun, request: Request, service: ServiceDep, who: Administrator, response: Response
) -> JobView:
    """Enters a run that `optigpu run` kept as a job that has ended, with its results and raw samples.

    They are ranked as others are, on their own hardware; who imports vouches for them.
    """
    with service.database.write() as session:
        job = linked(outcomes.enter_run(session, posted.run, posted.spec), service)
        audit.write(session, who.actor, AuditAction.RUN_IMPORTED, job.id)
    request.state.job_id = job.id
    response.headers["Location"] = job.links["self"]
    return job


@router.post(
    "/imports/others",
    status_code=201,
    operation_id="import_others",
    summary="Import what another tool measured",
    responses=problems(408, 413, 415)
    | {200: {"model": OthersView, "description": "The same was imported before."}},
    openapi_extra=posted(OthersFile, OTHERS),
)
def import_others(
    body: Annotated[bytes, Depends(run_body)], service: ServiceDep, who: Administrator, response: Response
) -> OthersView:
    """Enters a tool's figures as `optigpu import` reads them from its file.

    They are marked as measured by others and ranked nowhere; `GET /v1/leaderboard?others=true` lists them.
    """
    file = strict_document(body, OthersFile)
    with service.database.write() as session:
        added = others.add(session, file)
        if added.created:
            audit.write(session, who.actor, AuditAction.OTHERS_IMPORTED, added.file.id, {"tool": file.tool})
    response.status_code = 201 if added.created else 200
    return added.file


@router.delete(
    "/imports/others/{id}",
    status_code=204,
    operation_id="remove_others",
    summary="Remove what another tool measured",
    responses=problems(404),
)
def remove_others(file_id: Id, service: ServiceDep, who: Administrator) -> None:
    """Removes the figures of one imported file."""
    with service.database.write() as session:
        others.remove(session, file_id)
        audit.write(session, who.actor, AuditAction.OTHERS_REMOVED, file_id)


LARGEST_SEQUENCE = 2**63 - 1
RECONNECT_MS = 2000


class From(Frozen):
    """Where a stream begins."""

    after: Annotated[
        int,
        Query(ge=0, le=LARGEST_SEQUENCE, description="The sequence of the last event that the caller has."),
    ] = 0


LastEventId = Annotated[
    int | None,
    Header(
        ge=0,
        le=LARGEST_SEQUENCE,
        description="Sent by a browser that reconnects; it takes precedence over `after`.",
    ),
]
EVENT_MESSAGE: dict[str, object] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "The event's sequence."},
        "event": {"type": "string", "description": "The event's kind."},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": schema_of(EventView),
        },
    },
}
STREAM: dict[str, object] = {
    "description": "One message for each event.",
    "content": {"text/event-stream": {"schema": EVENT_MESSAGE}},
}


def newest_event(job_id: JobId, service: ServiceDep, _: Reader) -> int:
    """The sequence of the job's newest event. Raises NotFoundError."""
    with service.database.read() as session:
        return events.head(session, job_id).sequence


@router.get(
    "/jobs/{id}/events",
    operation_id="follow_job",
    summary="Follow a job",
    response_class=StreamingResponse,
    responses=problems(404, 410) | {200: STREAM},
)
async def follow_job(
    job_id: JobId,
    newest: Annotated[int, Depends(newest_event)],
    service: ServiceDep,
    begin: Annotated[From, Query()],
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Server-sent events from the first one, or from the one after `Last-Event-ID`, until the job has ended."""
    after = begin.after if last_event_id is None else last_event_id
    return StreamingResponse(
        _messages(service, job_id, min(after, newest)),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _messages(service: Service, job_id: str, after: int) -> AsyncIterator[bytes]:
    """The first event says when to come back if the stream breaks off, as it does when the service stops."""
    retry: int | None = RECONNECT_MS
    async for event in service.feeds.follow(job_id, after):
        if event is None:
            yield format_sse_event(comment="still here")
        else:
            data = event.model_dump_json()
            yield format_sse_event(data_str=data, event=event.kind, id=str(event.sequence), retry=retry)
            retry = None


schemas = APIRouter(prefix="/v1", tags=["schema"], responses=GUARDED)


class Techniques(Frozen):
    """Every technique: its name, layer, summary, what it requires and excludes, its JSON schema."""

    techniques: tuple[dict[str, Any], ...]


class Workloads(Frozen):
    """Every workload: its kind, summary, metrics, its JSON schema."""

    workloads: tuple[dict[str, Any], ...]


@schemas.get("/schema/job", operation_id="get_job_schema", summary="The JSON schema of a job")
def get_job_schema(_: Reader) -> dict[str, Any]:
    """The schema of the body of `POST /v1/jobs`."""
    return JobSpec.model_json_schema()


@schemas.get("/schema/techniques", operation_id="list_techniques", summary="List techniques")
def list_techniques(_: Reader) -> Techniques:
    """The techniques that a stack can be made of."""
    from optigpu.report.catalog import technique_fact

    return Techniques(
        techniques=tuple(
            technique_fact(kind) | {"schema": kind.model_json_schema()} for kind in TECHNIQUES.values()
        )
    )


@schemas.get("/schema/workloads", operation_id="list_workloads", summary="List workloads")
def list_workloads(_: Reader) -> Workloads:
    """The workloads that can be measured."""
    return Workloads(
        workloads=tuple(
            {
                "kind": name,
                "summary": kind.summary,
                "primary": kind.primary,
                "metrics": [*kind.metrics, *kind.for_some, *kind.of_queries, *kind.of_loads],
                "needs_model": kind.task.needs_model,
                "backends": [
                    backend.name
                    for backend in BACKENDS.values()
                    if not backend.supports(kind.model_construct(kind=name), None)
                ],
                "schema": kind.model_json_schema(),
            }
            for name, kind in WORKLOADS.items()
        )
    )
