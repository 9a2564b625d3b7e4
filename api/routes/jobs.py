"""Jobs: submit, get, list, cancel, put back, withdraw."""

from typing import Annotated, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response

from api.auth import Administrator, Reader, Submitter
from api.inputs import Cursor, JobBody, JobId, Limit, Withdrawing
from api.openapi import GUARDED, POSTED_JOB, problems
from api.posting import Posting
from api.service import Service, ServiceDep
from optigpu.documents.administration import AuditAction
from optigpu.documents.queries import PRINTABLE
from optigpu.documents.views import (
    JobPage,
    JobSummary,
    JobView,
    WithdrawalView,
    Withdrawn,
)
from optigpu.job.spec import Tag
from optigpu.store import audit, jobs, withdrawals
from optigpu.vocabulary import Frozen, JobState

Job = TypeVar("Job", bound=JobSummary)

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=GUARDED)

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
    "",
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


@router.get("", operation_id="list_jobs", summary="List jobs, the newest first")
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


@router.get("/{id}", operation_id="get_job", summary="Get a job", responses=problems(404, 410))
def get_job(job_id: JobId, service: ServiceDep, _: Reader) -> JobView:
    """State, progress, queue position, attempts and variants; and while no live worker can take the job, why."""
    with service.database.read() as session:
        return linked(jobs.get(session, job_id, lease_s=service.settings.lease_s), service)


@router.post("/{id}/cancel", operation_id="cancel_job", summary="Cancel a job", responses=problems(404, 410))
def cancel_job(job_id: JobId, service: ServiceDep, who: Submitter) -> JobView:
    """A queued job is cancelled at once, a running one when its processes have ended. An ended job stays as it is."""
    return linked(Posting(service, who).cancel(job_id), service)


@router.post(
    "/{id}/retry",
    operation_id="retry_job",
    summary="Put a parked job back",
    responses=problems(404, 409, 410),
)
def retry_job(job_id: JobId, service: ServiceDep, who: Submitter) -> JobView:
    """A parked job waits for a worker again, and what was measured of it is kept. A job that waits or runs stays as it
    is; another that has ended is refused."""
    return linked(Posting(service, who).retry(job_id), service)


@router.delete("/{id}", operation_id="withdraw_job", summary="Withdraw a job", responses=problems(404, 409))
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
