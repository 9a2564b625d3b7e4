"""What a job would be, before it is posted."""

from fastapi import APIRouter

from api.auth import Submitter
from api.inputs import JobBody, JobPreview, posted_job
from api.openapi import GUARDED, POSTED_JOB, problems

router = APIRouter(prefix="/v1/preview", tags=["jobs"], responses=GUARDED)


@router.post(
    "",
    operation_id="preview_job",
    summary="Look at a job without posting it",
    responses=problems(408, 413, 415),
    openapi_extra=POSTED_JOB,
)
def preview_job(body: JobBody, _: Submitter) -> JobPreview:
    """Validates the job as a POST does, and says which variants it has and about how long they take. Nothing is
    stored."""
    return posted_job(body).preview()
