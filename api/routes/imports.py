"""Runs that were measured elsewhere."""

from fastapi import APIRouter, Request, Response

from api.auth import Administrator
from api.inputs import PostedRun
from api.openapi import GUARDED, problems
from api.routes.jobs import linked
from api.service import ServiceDep
from optigpu.documents.administration import AuditAction
from optigpu.documents.views import JobView
from optigpu.store import audit, outcomes

router = APIRouter(prefix="/v1", tags=["jobs"], responses=GUARDED)


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
