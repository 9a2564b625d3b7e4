"""Authentication and permissions by keys in the header `Authorization: Bearer`, or by a browser's sign-in.

A service on loopback is open until the first key exists; then every call needs a key. A service that other machines can
reach always needs a key, even after the last one was revoked. With `public_read` reading needs none: whoever has no key
may read all that a key of the scope read may, and change nothing.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.callers import Caller
from api.gate import Admitted, Call, bearer_key, unauthorized
from api.problems import ProblemError, request_id
from api.service import ServiceDep
from api.settings import ServiceSettings
from api.sign_in import SAFE_METHODS, Seal, signed_in_by
from optigpu.store import keys
from optigpu.store.database import Database
from optigpu.store.keys import Scope

CSRF_HEADER = "X-CSRF-Token"
ADMITTED = "admitted"
"""Where the state of a request says that it has been let in before it reached its route."""

_BEARER = HTTPBearer(
    auto_error=False,
    bearerFormat="opaque key",
    description="Create a key with `python -m api keys create`. A service on loopback without keys needs none.",
)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


async def caller(request: Request, service: ServiceDep, _: Credentials) -> Caller:
    """Returns the caller and counts the call against the rate limit. Raises ProblemError 401, 403 or 429.

    A browser sends its cookie by itself, whoever wrote the page that calls: with it alone nothing can be changed.
    """
    admitted = request.scope["state"].get(ADMITTED)
    if admitted is None:
        call = call_of(request)
        if call.sign_in and request.method not in SAFE_METHODS:
            Seal(call.sign_in).require(request.headers.get(CSRF_HEADER))
        admitted = await service.gate.admit(call)
    assert isinstance(admitted, Admitted)
    return admitted.caller


def call_of(request: Request) -> Call:
    """What the request shows: the key of its header, or else its browser's sign-in."""
    key = bearer_key(request.headers.get("authorization"))
    sign_in = None if key else signed_in_by(request)
    return Call(key, address_of(request), request_id(request.scope), sign_in)


def address_of(request: Request) -> str:
    """From where a request came: the proxy of a service behind one, unless it says for whom it asks."""
    return request.client.host if request.client else "unknown"


def needs_key(settings: ServiceSettings, database: Database) -> bool:
    """Whether a call without a key is refused."""
    return not settings.on_loopback or has_key(settings, database)


def has_key(settings: ServiceSettings, database: Database) -> bool:
    """Whether a key exists, in the environment or in the database."""
    if settings.api_key is not None:
        return True
    with database.read() as session:
        return keys.any(session)


def _needs(scope: Scope) -> Callable[[Caller], Awaitable[Caller]]:
    async def check(who: Annotated[Caller, Depends(caller)]) -> Caller:
        require(who, scope)
        return who

    return check


def require(who: Caller, scope: Scope) -> None:
    """Raises ProblemError 401 or 403 unless the caller may make calls of this scope."""
    if who.may(scope):
        return
    if who.reads_only:
        raise unauthorized(has_key=False)
    raise ProblemError(
        403,
        f"This call needs a key with the scope {scope}.",
        headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'},
    )


Reader = Annotated[Caller, Depends(_needs(Scope.READ))]
Submitter = Annotated[Caller, Depends(_needs(Scope.SUBMIT))]
Administrator = Annotated[Caller, Depends(_needs(Scope.ADMIN))]
