"""Authentication and permissions by keys in the header `Authorization: Bearer`, or by a browser's sign-in.

A service on loopback is open until the first key exists; then every call needs a key. A service that other machines can
reach always needs a key, even after the last one was revoked. With `public_read` reading needs none: whoever has no key
may read all that a key of the scope read may, and change nothing.

A browser that is signed in sends a cookie by itself, with whatever calls this service, so a call that changes something
must also show the token that our pages carry. It is an HMAC of the cookie, which no other page can read; a browser that
is not signed in has a cookie of chance for it.
"""

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.gate import Admitted, Call, Caller, bearer_key, unauthorized
from api.problems import ProblemError, request_id
from api.service import ServiceDep
from api.settings import ServiceSettings
from optigpu.store import keys
from optigpu.store.database import Database
from optigpu.store.keys import Scope

SIGN_IN = "optigpu_sign_in"
VISITOR = "optigpu_visitor"
"""Names of cookies: of a browser that is signed in, and of one that has been shown a form."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""With these a call changes nothing."""
_PURPOSE = b"a form of OptiGPU"


@dataclass(frozen=True)
class Seal:
    """What the forms of one browser are sealed with: its cookie."""

    secret: str
    is_new: bool = False

    @property
    def token(self) -> str:
        """What each form carries."""
        return hmac.new(self.secret.encode("utf-8", "surrogatepass"), _PURPOSE, hashlib.sha256).hexdigest()

    def require(self, token: str | None) -> None:
        """Raises ProblemError 403 unless that is the token."""
        if token is None or not hmac.compare_digest(
            token.encode("utf-8", "surrogatepass"), self.token.encode()
        ):
            raise ProblemError(
                403, "The form is not from a page of this service, or it is too old; load the page again."
            )


def seal_of(request: Request) -> Seal:
    """The browser's seal; a new one if it has no cookie yet, which `keep_seal` gives it with the page."""
    known = signed_in_by(request) or request.cookies.get(VISITOR)
    return Seal(known) if known else Seal(secrets.token_urlsafe(32), is_new=True)


def keep_seal(response: Response, request: Request, settings: ServiceSettings, seal: Seal) -> None:
    """Sets the cookie of a seal that is new."""
    if seal.is_new:
        _set(response, request, settings, VISITOR, seal.secret, None)


def signed_in_by(request: Request) -> str | None:
    """What the cookie holds of a browser that is, or was, signed in."""
    return request.cookies.get(SIGN_IN) or None


def sign_in(response: Response, request: Request, settings: ServiceSettings, secret: str) -> None:
    """Sets the cookie of a browser that is signed in from now on."""
    _set(response, request, settings, SIGN_IN, secret, settings.session_s)


def sign_out(response: Response, settings: ServiceSettings) -> None:
    """Removes both cookies."""
    for name in (SIGN_IN, VISITOR):
        response.delete_cookie(name, path=settings.prefix or "/", httponly=True, samesite="strict")


def _set(
    response: Response,
    request: Request,
    settings: ServiceSettings,
    name: str,
    value: str,
    lasts_s: int | None,
) -> None:
    """No script reads it, no other site has it sent, and where there is https it goes over nothing else."""
    secure = request.url.scheme == "https" or settings.hsts_s > 0
    response.set_cookie(
        name,
        value,
        max_age=lasts_s,
        path=settings.prefix or "/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )


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
