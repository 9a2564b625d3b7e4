"""Every error is a problem document (RFC 9457): its media type, its fields, and the handlers that make it."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from api.rendering import look, page, wants_page
from optigpu.documents.fields import WHOLE, Entry, describe_parameters
from optigpu.documents.views import Problem
from optigpu.store.database import StoreUnavailableError, WithdrawnError
from optigpu.store.statements import CursorError
from optigpu.vocabulary import ConflictError, DocumentError, NotFoundError, StoreError

MEDIA_TYPE = "application/problem+json"
logger = structlog.stdlib.get_logger("api")


class ProblemError(Exception):
    """Ends the request with a problem document. `detail` is one sentence for a person.

    `server_time_us` is for a device whose clock is wrong; other documents have no such field.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        errors: Sequence[Entry] = (),
        headers: Mapping[str, str] | None = None,
        server_time_us: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = headers
        self.server_time_us = server_time_us


def problem_response(scope: Scope, problem: ProblemError) -> Response:
    """The document, or a page where a browser asks for one; `instance` is the request's identifier, as the logs have
    it."""
    if wants_page(scope):
        return _problem_page(scope, problem)
    document = Problem(
        title=HTTPStatus(problem.status).phrase,
        status=problem.status,
        detail=problem.detail,
        instance=f"urn:uuid:{request_id(scope)}",
        errors=problem.errors,
        server_time_us=problem.server_time_us,
    )
    left_out = None if problem.server_time_us is not None else {"server_time_us"}
    return Response(document.model_dump_json(exclude=left_out), problem.status, problem.headers, MEDIA_TYPE)


def _problem_page(scope: Scope, problem: ProblemError) -> Response:
    request = Request(scope)
    return page(
        request,
        "problem.html",
        look(request, scope["root_path"]),
        problem.status,
        problem.headers,
        title=HTTPStatus(problem.status).phrase,
        problem=problem,
        instance=request_id(scope),
    )


def request_id(scope: Scope) -> str:
    """The identifier that the outermost middleware gave to the request."""
    return str(scope["state"]["request_id"])


def from_store(error: StoreError) -> ProblemError:
    """The HTTP status and fields for an error of the store."""
    if isinstance(error, WithdrawnError):
        return ProblemError(410, str(error))
    if isinstance(error, NotFoundError):
        return ProblemError(404, str(error))
    if isinstance(error, ConflictError):
        return ProblemError(409, str(error))
    if isinstance(error, DocumentError):
        return ProblemError(422, str(error), [{"field": WHOLE, "message": str(error)}])
    if isinstance(error, CursorError):
        return ProblemError(422, str(error), [{"field": "cursor", "message": str(error)}])
    return unavailable(error)


def unavailable(error: StoreError) -> ProblemError:
    """Logs the database and the cause; the answer does not contain the database's address."""
    logger.error("database_refused", error=str(error), waiting=isinstance(error, StoreUnavailableError))
    return ProblemError(
        503, "The results database cannot be used now; try again.", headers={"Retry-After": "5"}
    )


def install(app: FastAPI) -> None:
    """Registers the handlers; any other error becomes a 500 in the middleware."""
    app.add_exception_handler(ProblemError, _problem)
    app.add_exception_handler(StoreError, _store)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _parameters)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(request.scope, error)


async def _store(request: Request, error: Exception) -> Response:
    assert isinstance(error, StoreError)
    return problem_response(request.scope, from_store(error))


async def _http(request: Request, error: Exception) -> Response:
    """Handles Starlette's own errors: an unknown path (404) or method (405)."""
    assert isinstance(error, HTTPException)
    details = {
        404: f"There is nothing at {request.url.path[:200]}; {request.scope['root_path']}/docs lists the calls.",
        405: f"This path does not take {request.method}; the header Allow lists the methods that it takes.",
    }
    detail = details.get(error.status_code, str(error.detail))
    headers = {"Allow": ", ".join(_allowed(request))} if error.status_code == 405 else error.headers
    return problem_response(request.scope, ProblemError(error.status_code, detail, headers=headers))


def _allowed(request: Request) -> list[str]:
    """Every method of a path; the router itself names only those of the first call that it finds there."""

    def matches(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in ("GET", "POST", "DELETE") if matches(method)]


async def _parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    entries = describe_parameters(list(error.errors()))
    return problem_response(request.scope, ProblemError(422, summary(entries), entries))


def summary(entries: Sequence[Entry]) -> str:
    """Returns the first field's message, and how many other fields are wrong."""
    first = f"{entries[0]['field']}: {entries[0]['message']}"
    return first if len(entries) == 1 else f"{first} ({len(entries) - 1} more in `errors`)"
