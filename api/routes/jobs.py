"""Jobs: submit, get, list, cancel, withdraw."""

from typing import Annotated, TypeVar

from fastapi import APIRouter, BackgroundTasks, Header, Query, Response

from api.auth import Administrator, Caller, Reader, Submitter
from api.bodies import PostedSpec
from api.openapi import GUARDED, POSTED_JOB, problems
from api.parameters import PRINTABLE, Cursor, Id, Limit, Withdrawing
from api.service import Service, ServiceDep
from optigpu.documents.views import JobPage, JobSummary, JobView, WithdrawalView
from optigpu.job.spec import Tag
from optigpu.store import jobs, withdrawals
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
    """Validates the job and stores it; a worker that can run it picks it up. `unserved` says why none can, if so."""
    with service.database.write() as session:
        submitted = jobs.submit(
            session,
            spec,
            idempotency_key=_callers_own(idempotency_key, who),
            lease_s=service.settings.lease_s,
        )
    if submitted.created:
        after_commit.add_task(service.doorbell.ring, spec.device)
    job = linked(submitted.job, service)
    response.headers["Location"] = job.links["self"]
    return job


@router.get("", operation_id="list_jobs", summary="List jobs, the newest first")
def list_jobs(service: ServiceDep, _: Reader, wanted: Annotated[JobFilter, Query()]) -> JobPage:
    """A page of jobs; `next_cursor` leads to the one after it."""
    with service.database.read() as session:
        page = jobs.list_(
            session, state=wanted.state, tag=wanted.tag, limit=wanted.limit, cursor=wanted.cursor
        )
    return page.model_copy(update={"jobs": tuple(linked(job, service) for job in page.jobs)})


@router.get("/{id}", operation_id="get_job", summary="Get a job", responses=problems(404, 410))
def get_job(job_id: Id, service: ServiceDep, _: Reader) -> JobView:
    """State, progress, queue position, attempts and variants; and while no live worker can take the job, why."""
    with service.database.read() as session:
        return linked(jobs.get(session, job_id, lease_s=service.settings.lease_s), service)


@router.post("/{id}/cancel", operation_id="cancel_job", summary="Cancel a job", responses=problems(404, 410))
def cancel_job(job_id: Id, service: ServiceDep, _: Submitter) -> JobView:
    """A queued job is cancelled at once, a running one when its processes have ended. An ended job stays as it is."""
    with service.database.write() as session:
        job = jobs.request_cancel(session, job_id, lease_s=service.settings.lease_s)
    return linked(job, service)


@router.delete("/{id}", operation_id="withdraw_job", summary="Withdraw a job", responses=problems(404, 409))
def withdraw_job(
    job_id: Id, service: ServiceDep, who: Administrator, asked: Annotated[Withdrawing, Query()]
) -> WithdrawalView:
    """Removes a job with all of its results, and keeps who withdrew it, when and why; reading it answers 410 from then
    on. A running job is refused: cancel it first. Withdrawing it again changes nothing."""
    with service.database.write() as session:
        return withdrawals.withdraw_job(session, job_id, asked.by(who))


def linked(job: Job, service: Service) -> Job:
    """The job with its links."""
    place = f"{service.settings.prefix}/v1/jobs/{job.id}"
    links = {name: f"{place}/{name}" for name in ("events", "results", "cancel")}
    return job.model_copy(update={"links": {"self": place} | links})


def _callers_own(key: str | None, who: Caller) -> str | None:
    """Idempotency keys of different callers are kept apart."""
    return None if key is None else f"{who.id}:{key}"
