"""Authentication and permissions by keys in the header `Authorization: Bearer`.

A service on loopback is open until the first key exists; then every call needs a key. A service that other machines can
reach always needs a key, even after the last one was revoked. With `public_read` reading needs none: whoever has no key
may read all that a key of the scope read may, and change nothing.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.problems import ProblemError
from api.service import Service, ServiceDep
from api.settings import ServiceSettings
from optigpu.store import keys
from optigpu.store.database import Database
from optigpu.store.keys import KeyInfo, Scope

_IMPLIES = {
    Scope.READ: {Scope.READ},
    Scope.SUBMIT: {Scope.READ, Scope.SUBMIT},
    Scope.ADMIN: set(Scope),
}
"""What a key of each scope may do."""


@dataclass(frozen=True)
class Caller:
    """The sender of a request. `key` is None if the service needs no key."""

    key: KeyInfo | None
    reads_only: bool = False
    """Whether the caller has no key where others need one, and may read because the service says so."""

    @property
    def id(self) -> str:
        """The key's id, or the address of a caller without a key."""
        return self.key.id if self.key else "open"

    @property
    def name(self) -> str:
        """The key's name, as tombstones keep it."""
        return self.key.name if self.key else "a caller without a key"

    def may(self, scope: Scope) -> bool:
        """Whether the caller may make calls of this scope."""
        if self.key is None:
            return scope is Scope.READ or not self.reads_only
        return any(scope in _IMPLIES[own] for own in self.key.scopes)


_BEARER = HTTPBearer(
    auto_error=False,
    bearerFormat="opaque key",
    description="Create a key with `python -m api.keys create`. A service on loopback without keys needs none.",
)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


def caller(request: Request, service: ServiceDep, credentials: Credentials) -> Caller:
    """Returns the caller and counts the call against the rate limit. Raises ProblemError 401 or 429.

    Where no key is needed, one that was never known is let through: a client may send to every service what one of them
    asks for. One that was revoked is refused.
    """
    key = _known(service, credentials.credentials) if credentials else None
    address = request.client.host if request.client else "unknown"
    service.limiter.count(key.id if key else f"address:{address}")
    if key is None and needs_key(service.settings, service.database):
        if credentials or not service.settings.public_read:
            raise _unauthorized(has_key=credentials is not None)
        return Caller(None, reads_only=True)
    if key is None and _is_revoked(service, credentials):
        raise _unauthorized(has_key=True)
    return Caller(key)


def _is_revoked(service: Service, credentials: HTTPAuthorizationCredentials | None) -> bool:
    """Whether what is no valid key was one."""
    if credentials is None:
        return False
    with service.database.read() as session:
        return keys.is_known(session, credentials.credentials)


def needs_key(settings: ServiceSettings, database: Database) -> bool:
    """Whether a call without a key is refused."""
    return not settings.on_loopback or has_key(settings, database)


def has_key(settings: ServiceSettings, database: Database) -> bool:
    """Whether a key exists, in the environment or in the database."""
    if settings.api_key is not None:
        return True
    with database.read() as session:
        return keys.any(session)


def _known(service: Service, plain: str) -> KeyInfo | None:
    """The key, read without a write lock: only the first use of the environment's key writes."""
    with service.database.read() as session:
        key = keys.verify(session, plain)
        known = key is not None or keys.is_known(session, plain)
    if not known and _is_from_environment(plain, service.settings):
        with service.database.write() as session:
            keys.ensure(session, plain, "OPTIGPU_API_KEY", [Scope.ADMIN])
            key = keys.verify(session, plain)
    if key is not None:
        service.key_uses.note(key.id)
    return key


def _is_from_environment(plain: str, settings: ServiceSettings) -> bool:
    """Whether this is the first key, which is entered when it is first used: the database may start after us."""
    named = settings.api_key
    return named is not None and hmac.compare_digest(plain.encode(), named.get_secret_value().encode())


def _unauthorized(*, has_key: bool) -> ProblemError:
    detail = (
        "The key is unknown or revoked." if has_key else "Send a key in the header Authorization: Bearer KEY."
    )
    challenge = 'Bearer error="invalid_token"' if has_key else "Bearer"
    return ProblemError(401, detail, headers={"WWW-Authenticate": challenge})


def _needs(scope: Scope) -> Callable[[Caller], Caller]:
    def check(who: Annotated[Caller, Depends(caller)]) -> Caller:
        if who.may(scope):
            return who
        if who.reads_only:
            raise _unauthorized(has_key=False)
        raise ProblemError(
            403,
            f"This call needs a key with the scope {scope}.",
            headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'},
        )

    return check


Reader = Annotated[Caller, Depends(_needs(Scope.READ))]
Submitter = Annotated[Caller, Depends(_needs(Scope.SUBMIT))]
Administrator = Annotated[Caller, Depends(_needs(Scope.ADMIN))]
