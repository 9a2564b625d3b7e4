"""The pilot of a cluster's allocation: it claims the one job of its token, and reports what a worker would write."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from anyio import from_thread
from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.auth import address_of
from api.gate import unauthorized
from api.inputs import json_body, strict_document
from api.openapi import GUARDED, PILOTS, posted, problems
from api.problems import ProblemError
from api.routes.jobs import linked
from api.service import ServiceDep
from optigpu import __version__
from optigpu.documents.events import (
    Fail,
    Finish,
    PilotBeat,
    PilotBeatAnswer,
    PilotEnd,
    PilotEvent,
    PilotOutcome,
    Release,
)
from optigpu.documents.result import Outcome
from optigpu.documents.views import JobView
from optigpu.job.measured import unplanned
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.store import jobs, launches, leases, outcomes, results
from optigpu.store.launches import Pilot, PilotLease
from optigpu.store.leases import Hold
from optigpu.store.results import Artifact
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import LeaseLostError

_BEARER = HTTPBearer(
    auto_error=False,
    scheme_name="PilotToken",
    bearerFormat="opaque token",
    description="The token of one job, which its launcher hands to the pilot. It ends with the job.",
)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


def pilot(request: Request, service: ServiceDep, credentials: Credentials) -> Pilot:
    """Returns the pilot and counts the call for it. Raises ProblemError 401 or 429.

    What has no valid token counts for its address.
    """
    found = None
    if credentials is not None:
        with service.database.read() as session:
            found = launches.verify(session, credentials.credentials)
    who = f"pilot:{found.launch_id}" if found else f"address:{address_of(request)}"
    from_thread.run(service.limiter.count, who)
    if found is None:
        raise unauthorized(has_key=credentials is not None)
    return found


PilotDep = Annotated[Pilot, Depends(pilot)]


async def _short_body(request: Request, service: ServiceDep, _: PilotDep) -> bytes:
    return await json_body(request, service.settings.max_body_bytes)


async def _long_body(request: Request, service: ServiceDep, _: PilotDep) -> bytes:
    """That of an outcome: samples and files may be long."""
    return await json_body(request, service.settings.max_import_bytes)


ShortBody = Annotated[bytes, Depends(_short_body)]
LongBody = Annotated[bytes, Depends(_long_body)]


@contextmanager
def holding() -> Iterator[None]:
    """A pilot that no longer holds its job is told so: 409."""
    try:
        yield
    except LeaseLostError as error:
        raise ProblemError(409, str(error)) from None


def require_planned(spec: JobSpec, outcome: Outcome) -> None:
    """Raises ProblemError 422 for a result of another workload than the job's: a pilot speaks for its job alone."""
    if outcome.result is None:
        return
    why = unplanned(outcome.result, variants_of(spec))
    if outcome.result.variant.index != outcome.index or why:
        message = f"The result is not of variant {outcome.index} of the job's plan{why and f': {why}'}."
        raise ProblemError(422, message, [{"field": "outcome.result", "message": message}])


router = APIRouter(prefix="/v1/pilot", tags=["pilots"], responses=GUARDED)
SENT = problems(408, 409, 413, 415)


@router.post(
    "/claim",
    operation_id="claim_job",
    summary="Claim the job of the token",
    responses=SENT,
    openapi_extra=posted(WorkerInfo, {"cpu": PILOTS["claim"]}),
)
def claim_job(body: ShortBody, service: ServiceDep, who: PilotDep) -> PilotLease:
    """The pilot says what its machine is and gets the job with a lease, as a worker does. The same worker that claims
    again gets the same lease. 409: another worker has the job, or the machine does not suit it."""
    worker = strict_document(body, WorkerInfo)
    if worker.version != __version__:
        raise ProblemError(
            409, f"The pilot is OptiGPU {worker.version} and the service {__version__}; install the same one."
        )
    with service.database.write() as session:
        found = launches.claim(session, who, worker, service.settings.lease_s)
    if isinstance(found, str):
        raise ProblemError(409, found)
    return PilotLease(lease=found, lease_s=service.settings.lease_s)


@router.post(
    "/heartbeat",
    operation_id="pilot_heartbeat",
    summary="Extend the lease",
    responses=SENT,
    openapi_extra=posted(PilotBeat, {"beat": PILOTS["beat"]}),
)
def pilot_heartbeat(body: ShortBody, service: ServiceDep, who: PilotDep) -> PilotBeatAnswer:
    """Extends the lease, stores the progress, and says whether the job is to be cancelled."""
    beat = strict_document(body, PilotBeat)
    with holding(), service.database.write() as session:
        hold = Hold(job_id=who.job_id, fencing=beat.fencing)
        asked = leases.heartbeat(session, hold, service.settings.lease_s, beat.progress)
    return PilotBeatAnswer(cancel_requested=asked)


@router.get("/job", operation_id="pilot_job", summary="Get the job of the token")
def pilot_job(service: ServiceDep, who: PilotDep) -> JobView:
    """As everybody who may read sees it."""
    with service.database.read() as session:
        return linked(jobs.get(session, who.job_id, lease_s=service.settings.lease_s), service)


@router.post(
    "/events",
    status_code=204,
    operation_id="pilot_event",
    summary="Report an event",
    responses=SENT | problems(404),
    openapi_extra=posted(PilotEvent, {"started": PILOTS["event"]}),
)
def pilot_event(body: ShortBody, service: ServiceDep, who: PilotDep) -> None:
    """The plan, a wait, an estimate, or the start of a variant."""
    sent = strict_document(body, PilotEvent)
    with holding(), service.database.write() as session:
        lease = leases.resumed(session, who.job_id, sent.fencing)
        outcomes.note(session, lease, sent.event)


@router.post(
    "/outcomes",
    status_code=204,
    operation_id="pilot_outcome",
    summary="Report how a variant ended",
    responses=SENT | problems(404),
    openapi_extra=posted(PilotOutcome, {"failed": PILOTS["outcome"]}),
)
def pilot_outcome(body: LongBody, service: ServiceDep, who: PilotDep) -> None:
    """Stores result, samples and files, all or none. The same again changes nothing."""
    sent = strict_document(body, PilotOutcome)
    kept = tuple(
        results.received_artifact(Artifact(**each.model_dump(exclude={"data"}), data=each.content))
        for each in sent.files
    )
    outcome = sent.outcome.model_copy(update={"artifacts": {}})
    with holding(), service.database.write() as session:
        lease = leases.resumed(session, who.job_id, sent.fencing)
        require_planned(lease.spec, outcome)
        outcomes.save_outcome(session, lease, outcome, kept)


@router.post(
    "/end",
    status_code=204,
    operation_id="pilot_end",
    summary="End the attempt",
    responses=SENT,
    openapi_extra=posted(PilotEnd, {"finish": PILOTS["end"]}),
)
def pilot_end(body: ShortBody, service: ServiceDep, who: PilotDep) -> None:
    """The job has ended, or this attempt failed, or the pilot hands the job back. The token of a job that has ended is
    valid no longer."""
    sent = strict_document(body, PilotEnd)
    with holding(), service.database.write() as session:
        hold = Hold(job_id=who.job_id, fencing=sent.fencing)
        match sent.end:
            case Finish():
                outcomes.finish(session, hold, sent.end.state, sent.end.reason, sent.end.attribution)
            case Fail():
                leases.fail(session, hold, sent.end.failure, sent.end.reason)
            case Release():
                leases.release(session, hold)
