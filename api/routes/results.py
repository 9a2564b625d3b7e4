"""Results as they were stored, never validated again with today's models: one with its raw samples and files, two
compared, and how one variant on one class of hardware did over time."""

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field

from api.auth import Administrator, Reader
from api.inputs import Cursor, Id, JobId, Uuid, Withdrawing
from api.openapi import GUARDED, problems
from api.problems import ProblemError
from api.routes.leaderboard import MetricName
from api.service import ServiceDep
from optigpu.documents.administration import AuditAction
from optigpu.documents.result import Attribution, Result
from optigpu.documents.views import ArtifactsView, Comparison, History, SamplesView, WithdrawalView, Withdrawn
from optigpu.store import audit, jobs, results, withdrawals
from optigpu.store.database import Database
from optigpu.vocabulary import Frozen

PIECE_NUMBERS = 4096
"""How many numbers are text at once."""


def samples_text(database: Database, result_id: str, names: Sequence[str]) -> Iterator[str]:
    """The JSON of a SamplesView, in pieces: a long run has millions of samples.

    Each metric is read in its own session: a slow reader holds none.
    """
    yield f'{{"result_id": {json.dumps(result_id)}, "samples": {{'
    for number, name in enumerate(names):
        with database.read() as session:
            lengths, data = results.packed_samples(session, result_id, name)
        yield f"{', ' if number else ''}{json.dumps(name)}: ["
        yield from _lists(lengths, data)
        yield "]"
    yield "}}"


def _lists(lengths: Sequence[int], data: bytes) -> Iterator[str]:
    """One list for each replicate, with commas between."""
    import numpy as np  # here, because samples are seldom asked for

    flat = np.frombuffer(zlib.decompress(data), dtype="<f8")
    start = 0
    for number, length in enumerate(lengths):
        yield ", [" if number else "["
        for at in range(start, start + length, PIECE_NUMBERS):
            piece = flat[at : min(at + PIECE_NUMBERS, start + length)].tolist()
            yield (", " if at > start else "") + json.dumps(piece)[1:-1]
        yield "]"
        start += length


router = APIRouter(prefix="/v1", tags=["results"], responses=GUARDED)
WITHDRAWN = problems(404, 410)


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
    "/results/{id}", operation_id="withdraw_result", summary="Withdraw a result", responses=problems(404, 409)
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


class HistoryQuery(Frozen):
    """Which metric, and how many results."""

    metric: Annotated[
        MetricName | None, Query(description="Default: the primary metric of the result's workload.")
    ] = None
    limit: Annotated[
        Annotated[int, Field(ge=1, le=results.MOST_POINTS)],
        Query(description="The largest number of results."),
    ] = 200
    cursor: Cursor | None = None


@router.get(
    "/results/{id}/history",
    operation_id="get_history",
    summary="The history of a result's variant",
    responses=WITHDRAWN,
)
def get_history(
    result_id: Id, service: ServiceDep, _: Reader, wanted: Annotated[HistoryQuery, Query()]
) -> History:
    """All valid results of the same variant on the same class of hardware, the newest page first, and where their level
    changed: by how much, and which versions changed with it."""
    from optigpu.statistics.changes import with_changes  # here, because it loads numpy

    metric = wanted.metric.value if wanted.metric else None
    with service.database.read() as session:
        found = results.history_of(
            session, result_id, metric=metric, limit=wanted.limit, cursor=wanted.cursor
        )
    return with_changes(found)


class ComparisonQuery(Frozen):
    """The two results to compare."""

    baseline: Annotated[Uuid, Query(description="The id of the result that ratios are relative to.")]
    candidate: Annotated[Uuid, Query(description="The id of the other one.")]
    anyway: Annotated[
        bool, Query(description="Compare different workloads or hardware too; notes then say what differs.")
    ] = False


@router.get(
    "/compare",
    operation_id="compare_results",
    summary="Compare two results",
    responses=problems(404, 409, 410),
)
def compare_results(
    service: ServiceDep, _: Reader, wanted: Annotated[ComparisonQuery, Query()]
) -> Comparison:
    """The ratio of each metric, its 95% interval, and whether the difference is real; from stored summaries."""
    from optigpu.statistics.compare import NotComparableError, compare  # here, because it loads numpy

    with service.database.read() as session:
        baseline, candidate = (results.get(session, each) for each in (wanted.baseline, wanted.candidate))
    try:
        return compare(baseline, candidate, anyway=wanted.anyway)
    except NotComparableError as error:
        raise ProblemError(409, str(error)) from None
