"""Who calls, what a caller may do, and who is let in: by which key, whether it was revoked, how often it was used."""

import asyncio
import hashlib
import hmac
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

import structlog
from fastapi.security.utils import get_authorization_scheme_param

from api.problems import ProblemError
from api.settings import ServiceSettings
from optigpu.documents.administration import AuditAction
from optigpu.store import audit, keys
from optigpu.store.audit import Actor
from optigpu.store.database import Database, Part, Revisions, Session, current_revisions
from optigpu.store.keys import KeyInfo, Scope
from optigpu.vocabulary import utc_now

if TYPE_CHECKING:
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import RateLimiter as Strategy

_IMPLIES = {
    Scope.READ: {Scope.READ},
    Scope.SUBMIT: {Scope.READ, Scope.SUBMIT},
    Scope.ADMIN: set(Scope),
}
"""What a key of each scope may do."""


@dataclass(frozen=True)
class Caller:
    """The sender of a request, from where, and the request's id. `key` is None if the service needs no key."""

    key: KeyInfo | None
    address: str
    request_id: str
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

    @property
    def actor(self) -> Actor:
        """The caller as the audit log names it."""
        key_id = self.key.id if self.key else None
        return Actor(name=self.name, key_id=key_id, address=self.address, request_id=self.request_id)

    def may(self, scope: Scope) -> bool:
        """Whether the caller may make calls of this scope."""
        if self.key is None:
            return scope is Scope.READ or not self.reads_only
        return any(scope in _IMPLIES[own] for own in self.key.scopes)


BROKEN_FOR_S = 30.0
REDIS_WAIT_S = 1.0
logger = structlog.stdlib.get_logger("api.gate")


class RateLimiter:
    """A moving window for each identity, in memory or in Redis. `rate` is written like "600/minute".

    While Redis is away each process counts for itself, so that a service without its broker still answers.
    """

    def __init__(self, rate: str, redis_url: str | None) -> None:
        from limits import parse
        from limits.aio.storage import MemoryStorage
        from limits.aio.strategies import SlidingWindowCounterRateLimiter

        self._rate = parse(rate)
        self._own = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._shared = SlidingWindowCounterRateLimiter(_redis_storage(redis_url)) if redis_url else None
        self._shared_again_at = 0.0

    async def count(self, identity: str) -> None:
        """Counts one call. Raises ProblemError 429, with the time to wait, if the limit is exceeded."""
        limiter = self._limiter()
        try:
            within = await limiter.hit(self._rate, identity)
        except Exception as error:
            if limiter is self._own:
                raise
            logger.warning("rate_limit_counts_in_memory", reason=str(error), seconds=BROKEN_FOR_S)
            self._shared_again_at = time.monotonic() + BROKEN_FOR_S
            within = await self._own.hit(self._rate, identity)
        if not within:
            raise await self._refusal(identity)

    async def _refusal(self, identity: str) -> ProblemError:
        """429, with the time to wait."""
        try:
            window = await self._limiter().get_window_stats(self._rate, identity)
            reset_s = window.reset_time - time.time()
        except Exception:  # Redis went away after it had counted
            reset_s = self._rate.get_expiry()
        wait_s = max(1, round(reset_s))
        return ProblemError(
            429,
            f"More than {self._rate.amount} calls in {self._rate.get_expiry()} s; try again in {wait_s} s.",
            headers={"Retry-After": str(wait_s)},
        )

    def _limiter(self) -> "Strategy":
        if self._shared is None or time.monotonic() < self._shared_again_at:
            return self._own
        return self._shared


def _redis_storage(url: str) -> "RedisStorage":
    from limits.aio.storage import RedisStorage

    return RedisStorage(
        url,
        implementation="redispy",
        key_prefix="optigpu:limits",
        socket_connect_timeout=REDIS_WAIT_S,
        socket_timeout=REDIS_WAIT_S,
    )


WRITE_EVERY_S = 60.0


class KeyUses:
    """When each key was last used: noted in memory, written once a minute, so that no request waits for a write.

    If the process dies, the last minute is lost.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._uses: dict[str, datetime] = {}
        self._changing = threading.Lock()

    def note(self, key_id: str) -> None:
        """The key is used now."""
        with self._changing:
            self._uses[key_id] = utc_now()

    def write(self) -> None:
        """Writes what was noted since the last write. What cannot be written is logged, and kept for the next one."""
        with self._changing:
            uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            with self._database.write() as session:
                keys.note_uses(session, uses)
        except Exception as error:  # one failure must not end the loop that writes
            logger.warning("key_uses_not_written", reason=str(error))
            with self._changing:
                self._uses = uses | self._uses

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Writes once a minute while the block lasts, and at its end."""
        task = asyncio.create_task(self._write_regularly())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(self.write)

    async def _write_regularly(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await asyncio.to_thread(self.write)


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


class Gate:
    """Admits the requests of one process."""

    def __init__(
        self, settings: ServiceSettings, database: Database, limiter: RateLimiter, key_uses: KeyUses
    ) -> None:
        self._settings = settings
        self._database = database
        self._limiter = limiter
        self._key_uses = key_uses
        self._known = _KnownKeys(None)
        self._next: asyncio.Task[Revisions] | None = None
        self._under_way: asyncio.Task[Revisions] | None = None

    async def admit(self, call: Call) -> Admitted:
        """Counts the call against the rate limit and returns who it is. Raises ProblemError 401 or 429, StoreError.

        Where no key is needed, one that was never known is let through: a client may send to every service what one of
        them asks for. One that was revoked is refused.
        """
        now = await self._revisions()
        known = self._known_as_of(now.get(Part.KEYS))
        admitted: Caller | ProblemError | None = self._from_memory(call, known)
        if admitted is None:
            admitted = await asyncio.to_thread(self._from_database, call, known)
        key = admitted.key if isinstance(admitted, Caller) else None
        who = key.id if key else f"address:{call.address}"
        await self._limiter.count(who)
        if isinstance(admitted, ProblemError):
            raise admitted
        if key is not None:
            self._key_uses.note(key.id)
        return Admitted(admitted, now)

    async def _revisions(self) -> Revisions:
        """The database's revisions as they are now. All who ask while one look is under way share the next one, so that
        nobody is let in by what was true before."""
        if self._next is None:
            self._next = asyncio.create_task(self._look(self._under_way))
        return await asyncio.shield(self._next)

    async def _look(self, before: asyncio.Task[Revisions] | None) -> Revisions:
        if before is not None and not before.done():
            await asyncio.wait([before])
        self._under_way, self._next = self._next, None
        return await asyncio.to_thread(self._read_revisions)

    def _read_revisions(self) -> Revisions:
        with self._database.glance() as connection:
            return current_revisions(connection)

    def _known_as_of(self, revision: str | None) -> "_KnownKeys":
        """What is known of keys if they have not changed since; a thread that reads them still keeps them with the
        revision that it began with."""
        if revision != self._known.revision or len(self._known.keys) > MOST_KEPT:
            self._known = _KnownKeys(revision)
        return self._known

    def _from_memory(self, call: Call, known: "_KnownKeys") -> Caller | None:
        """Who calls, if that is known without the database."""
        if call.key is not None and (key := known.get(call.key)) is not None:
            return Caller(key, call.address, call.request_id)
        if call.key is None and call.sign_in is None and known.any is not None:
            caller = self._without_key(call, needed=not self._settings.on_loopback or known.any)
            return caller if isinstance(caller, Caller) else None
        return None

    def _from_database(self, call: Call, known: "_KnownKeys") -> Caller | ProblemError:
        with self._database.glance() as connection, Session(connection) as session:
            key = self._key(session, call, known)
            if key is not None:
                return Caller(key, call.address, call.request_id)
            needed = not self._settings.on_loopback or self._has_key(session, known)
            if not needed and call.key and keys.is_known(session, call.key):
                return unauthorized(has_key=True)
            return self._without_key(call, needed=needed)

    def _without_key(self, call: Call, *, needed: bool) -> Caller | ProblemError:
        if needed and (call.key or not self._settings.public_read):
            return unauthorized(has_key=call.key is not None)
        return Caller(None, call.address, call.request_id, reads_only=needed)

    def _key(self, session: Session, call: Call, known: "_KnownKeys") -> KeyInfo | None:
        """The valid key of a call, read without a write lock: only the first use of the environment's key writes."""
        if call.key is None:
            return keys.signed_in(session, call.sign_in) if call.sign_in else None
        found = keys.verify(session, call.key)
        if found is None and self._is_first(call.key):
            if keys.is_known(session, call.key):  # revoked, or another request has entered it meanwhile
                return keys.verify(session, call.key)
            with self._database.write() as writing:
                entered = keys.ensure(writing, call.key, "OPTIGPU_API_KEY", [Scope.ADMIN])
                found = keys.verify(writing, call.key)
                if found is not None and entered:
                    who = Caller(found, call.address, call.request_id).actor
                    scopes = {"scopes": list(found.scopes)}
                    audit.write(writing, who, AuditAction.KEY_CREATED, found.id, scopes)
        if found is not None:
            known.keep(call.key, found)
        return found

    def _is_first(self, plain: str) -> bool:
        """Whether this is the environment's key, which is entered when it is first used: the database may start after
        us."""
        named = self._settings.api_key
        return named is not None and hmac.compare_digest(plain.encode(), named.get_secret_value().encode())

    def _has_key(self, session: Session, known: "_KnownKeys") -> bool:
        if known.any is None:
            known.any = self._settings.api_key is not None or keys.any(session)
        return known.any


@dataclass
class _KnownKeys:
    """Valid keys by their digest, and whether there is one, as of one revision of the keys."""

    revision: str | None
    any: bool | None = None
    keys: dict[bytes, KeyInfo] = field(default_factory=dict)

    def get(self, plain: str) -> KeyInfo | None:
        found = self.keys.get(_digest(plain))
        return None if found is None or found.has_expired(utc_now()) else found

    def keep(self, plain: str, key: KeyInfo) -> None:
        self.keys[_digest(plain)] = key


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
