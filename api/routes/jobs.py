"""Jobs: post, look, list, cancel."""

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, BackgroundTasks, Header, Query, Response

from api.auth import Caller, Reader, Submitter
from api.bodies import PostedSpec
from api.openapi import GUARDED, POSTED_JOB, problems
from api.parameters import PRINTABLE, Cursor, Id, Limit
from api.service import ServiceDep
from optigpu.documents.views import JobPage, JobSummary, JobView
from optigpu.store import jobs
from optigpu.vocabulary import Frozen, JobState

Job = TypeVar("Job", bound=JobSummary)

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=GUARDED)

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=PRINTABLE,
        description="The same key again with the same job answers with the job that the first call made.",
    ),
]


class JobFilter(Frozen):
    """Which jobs to list."""

    state: JobState | None = None
    limit: Limit = 50
    cursor: Cursor | None = None


ACCEPTED: dict[str, Any] = {
    "description": "The job is stored and waits for a worker.",
    "headers": {"Location": {"description": "Where the job is.", "schema": {"type": "string"}}},
}


@router.post(
    "",
    status_code=202,
    operation_id="submit_job",
    summary="Ask for a measurement",
    responses=problems(409, 413, 415) | {202: ACCEPTED},
    openapi_extra=POSTED_JOB,
)
def submit_job(
    spec: PostedSpec,
    service: ServiceDep,
    who: Submitter,
    response: Response,
    after_commit: BackgroundTasks,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Validates the job wholly and stores it; a worker that can run it takes it."""
    with service.database.write() as session:
        submitted = jobs.submit(session, spec, idempotency_key=_callers_own(idempotency_key, who))
    if submitted.created:
        after_commit.add_task(service.doorbell.ring, spec.device)
    job = linked(submitted.job)
    response.headers["Location"] = job.links["self"]
    return job


@router.get("", operation_id="list_jobs", summary="List jobs, the newest first")
def list_jobs(service: ServiceDep, _: Reader, wanted: Annotated[JobFilter, Query()]) -> JobPage:
    """A page of jobs; `next_cursor` leads to the one after it."""
    with service.database.read() as session:
        page = jobs.list_(session, state=wanted.state, limit=wanted.limit, cursor=wanted.cursor)
    return page.model_copy(update={"jobs": tuple(map(linked, page.jobs))})


@router.get("/{id}", operation_id="get_job", summary="Look at a job", responses=problems(404))
def get_job(job_id: Id, service: ServiceDep, _: Reader) -> JobView:
    """State, progress, place in the queue, attempts and variants."""
    with service.database.read() as session:
        return linked(jobs.get(session, job_id))


@router.post("/{id}/cancel", operation_id="cancel_job", summary="Cancel a job", responses=problems(404))
def cancel_job(job_id: Id, service: ServiceDep, _: Submitter) -> JobView:
    """A queued job is cancelled at once; a running one when its processes are gone. Harmless when it has ended."""
    with service.database.write() as session:
        return linked(jobs.request_cancel(session, job_id))


def linked(job: Job) -> Job:
    """The job with the places that belong to it."""
    place = f"/v1/jobs/{job.id}"
    links = {name: f"{place}/{name}" for name in ("events", "results", "cancel")}
    return job.model_copy(update={"links": {"self": place} | links})


def _callers_own(key: str | None, who: Caller) -> str | None:
    """Two callers may choose the same key without meeting each other's jobs."""
    return None if key is None else f"{who.id}:{key}"
