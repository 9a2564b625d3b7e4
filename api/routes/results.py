"""Results as they were stored: never validated again with today's models."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse, StreamingResponse

from api.auth import Administrator, Reader
from api.inputs import Id, JobId, Withdrawing
from api.openapi import GUARDED, problems
from api.samples import samples_text
from api.service import ServiceDep
from optigpu.documents.administration import AuditAction
from optigpu.documents.result import Attribution, Result
from optigpu.documents.views import ArtifactsView, SamplesView, WithdrawalView, Withdrawn
from optigpu.store import audit, jobs, results, withdrawals
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1", tags=["results"], responses=GUARDED | problems(404))
WITHDRAWN = problems(410)


class JobResults(Frozen):
    """The output of `optigpu run --format json`: the request, the results so far, and the gain of each technique."""

    spec: dict[str, Any]
    results: tuple[Result, ...]
    attribution: Attribution | None


@router.get(
    "/jobs/{id}/results",
    operation_id="get_job_results",
    summary="The results of a job",
    response_model=None,
    responses=WITHDRAWN | {200: {"model": JobResults}},
)
def get_job_results(job_id: JobId, service: ServiceDep, _: Reader) -> JSONResponse:
    """The results so far; the attribution is null until the job has ended."""
    with service.database.read() as session:
        job = jobs.get(session, job_id)
        found = results.of_job(session, job_id)
    return JSONResponse({"spec": job.spec, "results": found, "attribution": job.attribution})


ONE_RESULT: dict[str, object] = {
    "model": Result,
    "headers": {
        "Link": {
            "description": "Where its raw samples and its artifacts are.",
            "schema": {"type": "string"},
        }
    },
}


@router.get(
    "/results/{id}",
    operation_id="get_result",
    summary="One result",
    response_model=None,
    responses=WITHDRAWN | {200: ONE_RESULT},
)
def get_result(result_id: Id, service: ServiceDep, _: Reader) -> JSONResponse:
    """All metrics of one variant, with the verdict and the environment in which they were measured."""
    with service.database.read() as session:
        document = results.get(session, result_id)
    place = f"{service.settings.prefix}/v1/results/{result_id}"
    links = (f'<{place}/{name}>; rel="related"; title="{name}"' for name in ("samples", "artifacts"))
    return JSONResponse(document, headers={"Link": ", ".join(links)})


@router.delete(
    "/results/{id}", operation_id="withdraw_result", summary="Withdraw a result", responses=problems(409)
)
def withdraw_result(
    result_id: Id, service: ServiceDep, who: Administrator, asked: Annotated[Withdrawing, Query()]
) -> WithdrawalView:
    """Removes a result, and keeps who withdrew it, when and why; reading it answers 410 from then on.

    The next best result takes its place on the leaderboard. The result of a job that has not ended is refused.
    Withdrawing it again changes nothing.
    """
    with service.database.write() as session:
        known = withdrawals.is_withdrawn(session, Withdrawn.RESULT, result_id)
        withdrawn = withdrawals.withdraw_result(session, result_id, asked.by(who))
        if not known:
            audit.write(session, who.actor, AuditAction.RESULT_WITHDRAWN, result_id, {"reason": asked.reason})
    return withdrawn


@router.get(
    "/results/{id}/samples",
    operation_id="get_samples",
    summary="The raw samples of a result",
    response_model=None,
    responses=WITHDRAWN | {200: {"model": SamplesView}},
)
def get_samples(result_id: Id, service: ServiceDep, _: Reader) -> StreamingResponse:
    """One list of samples per metric and replicate, in the order in which they were taken; streamed."""
    with service.database.read() as session:
        names = results.sample_names(session, result_id)
    return StreamingResponse(samples_text(service.database, result_id, names), media_type="application/json")


@router.get(
    "/results/{id}/artifacts",
    operation_id="list_artifacts",
    summary="The files of a result",
    responses=WITHDRAWN,
)
def list_artifacts(result_id: Id, service: ServiceDep, _: Reader) -> ArtifactsView:
    """Files from the meters, such as a profiler's trace. A file that could not be kept has a reason and no link."""
    with service.database.read() as session:
        found = results.list_artifacts(session, result_id)
    place = f"{service.settings.prefix}/v1/results/{result_id}/artifacts"
    linked = (
        artifact.model_copy(update={"links": {"self": f"{place}/{artifact.name}"}})
        if artifact.reason is None
        else artifact
        for artifact in found.artifacts
    )
    return found.model_copy(update={"artifacts": tuple(linked)})


ArtifactName = Annotated[
    str,
    Path(
        alias="name",
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$",
        description="A name from the list of the result's artifacts.",
    ),
]
A_FILE: dict[str, object] = {
    "description": "The file, in its own media type.",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    "headers": {"Content-Disposition": {"description": "Its name.", "schema": {"type": "string"}}},
}


@router.get(
    "/results/{id}/artifacts/{name}",
    operation_id="get_artifact",
    summary="Download a file of a result",
    response_class=StreamingResponse,
    responses=WITHDRAWN | {200: A_FILE},
)
def get_artifact(result_id: Id, name: ArtifactName, service: ServiceDep, _: Reader) -> StreamingResponse:
    """Sent as a download, so that a browser never shows it as a page of this service."""
    with service.database.read() as session:
        artifact = results.find_artifact(session, result_id, name)
    headers = {
        "Content-Disposition": f'attachment; filename="{artifact.name}"',
        "Content-Length": str(artifact.size_bytes),
    }
    pieces = results.artifact_content(service.database, result_id, name)
    return StreamingResponse(pieces, media_type=artifact.media_type, headers=headers)
