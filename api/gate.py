"""Lets callers in: which key a request has, whether it was revoked, and how often it was used.

All requests that arrive while one look at the database is under way share the next one. So no request is let in by what
was true before it arrived, and a thousand requests a second cost the database no more than some hundred.
"""

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastapi.security.utils import get_authorization_scheme_param

from api.callers import Caller
from api.key_uses import KeyUses
from api.limits import RateLimiter
from api.problems import ProblemError
from api.settings import ServiceSettings
from api.together import Together
from optigpu.documents.administration import AuditAction
from optigpu.store import audit, keys, revisions, sign_ins
from optigpu.store.database import Database, Session
from optigpu.store.keys import KeyInfo, Scope
from optigpu.store.revisions import Part, Revisions
from optigpu.vocabulary import utc_now

MOST_KEPT = 10_000
"""Keys that are kept in memory."""


@dataclass(frozen=True)
class Call:
    """What a request shows at the gate."""

    key: str | None
    address: str
    request_id: str
    sign_in: str | None = None
    """What the cookie of a browser holds that is signed in; it counts where there is no key."""


@dataclass(frozen=True)
class Admitted:
    """A caller who may come in, and the database's revisions at that moment."""

    caller: Caller
    revisions: Revisions


Answer = Admitted | ProblemError


class Gate:
    """Admits the requests of one process."""

    def __init__(
        self, settings: ServiceSettings, database: Database, limiter: RateLimiter, key_uses: KeyUses
    ) -> None:
        self._settings = settings
        self._database = database
        self._limiter = limiter
        self._key_uses = key_uses
        self._known = _KnownKeys()
        self._together = Together[Call, Admitted](self._answers, "gate")

    async def admit(self, call: Call) -> Admitted:
        """Counts the call against the rate limit and returns who it is. Raises ProblemError 401 or 429, StoreError.

        Where no key is needed, one that was never known is let through: a client may send to every service what one of
        them asks for. One that was revoked is refused.
        """
        return await self._together.ask(call)

    def close(self) -> None:
        """Ends the thread that looks."""
        self._together.close()

    def _answers(self, calls: Sequence[Call]) -> list[Answer]:
        # Keys that change after this look at their revision are kept as of the revision before, and read again.
        with self._database.glance() as session:
            now = revisions.current(session)
            self._known.as_of(now.get(Part.KEYS))
            keys_ = [self._key(session, call) for call in calls]
            callers = [self._caller(session, call, key) for call, key in zip(calls, keys_, strict=True)]
        who = [key.id if key else f"address:{call.address}" for call, key in zip(calls, keys_, strict=True)]
        refusals = self._over_the_limit(who)
        return [
            next(refusals[name]) or (caller if isinstance(caller, ProblemError) else Admitted(caller, now))
            for name, caller in zip(who, callers, strict=True)
        ]

    def _over_the_limit(self, who: Sequence[str]) -> dict[str, Iterator[ProblemError | None]]:
        """For each caller one answer for each of its calls: None for those within the limit, which come first."""
        found: dict[str, Iterator[ProblemError | None]] = {}
        for name, times in Counter(who).items():
            within = self._limiter.admit(name, times)
            over = [self._limiter.refusal(name)] * (times - within) if within < times else []
            found[name] = iter([*[None] * within, *over])
        return found

    def _caller(self, session: Session, call: Call, key: KeyInfo | None) -> Caller | ProblemError:
        if key is not None:
            self._key_uses.note(key.id)
            return Caller(key, call.address, call.request_id)
        needed = not self._settings.on_loopback or self._has_key(session)
        if needed and (call.key or not self._settings.public_read):
            return unauthorized(has_key=call.key is not None)
        if not needed and call.key and keys.is_known(session, call.key):
            return unauthorized(has_key=True)
        return Caller(None, call.address, call.request_id, reads_only=needed)

    def _key(self, session: Session, call: Call) -> KeyInfo | None:
        """The valid key of a call, read without a write lock: only the first use of the environment's key writes."""
        if call.key is None:
            return sign_ins.find(session, call.sign_in) if call.sign_in else None
        found = self._known.get(call.key) or keys.verify(session, call.key)
        if found is None and self._is_first(call.key) and not keys.is_known(session, call.key):
            with self._database.write() as writing:
                entered = keys.ensure(writing, call.key, "OPTIGPU_API_KEY", [Scope.ADMIN])
                found = keys.verify(writing, call.key)
                if found is not None and entered:
                    who = Caller(found, call.address, call.request_id).actor
                    scopes = {"scopes": list(found.scopes)}
                    audit.write(writing, who, AuditAction.KEY_CREATED, found.id, scopes)
        if found is not None:
            self._known.keep(call.key, found)
        return found

    def _is_first(self, plain: str) -> bool:
        """Whether this is the environment's key, which is entered when it is first used: the database may start after
        us."""
        named = self._settings.api_key
        return named is not None and hmac.compare_digest(plain.encode(), named.get_secret_value().encode())

    def _has_key(self, session: Session) -> bool:
        if self._known.any is None:
            self._known.any = self._settings.api_key is not None or keys.any(session)
        return self._known.any


class _KnownKeys:
    """Valid keys by their digest, and whether there is one, for as long as none is made, revoked or rotated."""

    def __init__(self) -> None:
        self.any: bool | None = None
        self._revision: str | None = None
        self._keys: dict[bytes, KeyInfo] = {}

    def as_of(self, revision: str | None) -> None:
        """Forgets everything if keys have changed since."""
        if revision != self._revision or len(self._keys) > MOST_KEPT:
            self.any, self._revision, self._keys = None, revision, {}

    def get(self, plain: str) -> KeyInfo | None:
        found = self._keys.get(_digest(plain))
        return None if found is None or found.has_expired(utc_now()) else found

    def keep(self, plain: str, key: KeyInfo) -> None:
        self._keys[_digest(plain)] = key


def bearer_key(authorization: str | None) -> str | None:
    """The key of a header Authorization; None for another scheme."""
    scheme, key = get_authorization_scheme_param(authorization)
    return key if key and scheme.lower() == "bearer" else None


def unauthorized(*, has_key: bool) -> ProblemError:
    """What a call without a valid key is told."""
    detail = (
        "The key is unknown, revoked or expired."
        if has_key
        else "Send a key in the header Authorization: Bearer KEY."
    )
    challenge = 'Bearer error="invalid_token"' if has_key else "Bearer"
    return ProblemError(401, detail, headers={"WWW-Authenticate": challenge})


def _digest(plain: str) -> bytes:
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).digest()
