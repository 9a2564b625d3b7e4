"""Calls of a pilot: it proves by its token which job it may speak for, before its body is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.auth import address_of
from api.bodies import json_body
from api.gate import unauthorized
from api.problems import ProblemError
from api.service import ServiceDep
from optigpu.documents.result import Outcome
from optigpu.job.measured import unplanned
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.store import launches
from optigpu.store.launches import Pilot
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
    service.limiter.count(f"pilot:{found.launch_id}" if found else f"address:{address_of(request)}")
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
