"""The service's API keys: each is shown once, and only its hash is stored."""

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import delete, or_, select, update
from sqlalchemy.orm import Session

from optigpu.store.database import Part, mark_changed, moment, row_of
from optigpu.store.statements import insert_into
from optigpu.store.tables import ApiKey, SignIn
from optigpu.vocabulary import ConflictError, Frozen, StoreError, new_id, utc_now

KEY_PREFIX = "og_"
SHOWN_CHARACTERS = 7
LEAST_CHARACTERS = 20


class Scope(StrEnum):
    """What a key allows; each one contains those before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


class KeyInfo(Frozen):
    """A key without its secret: `prefix` are its first characters. Without `expires_at` it is valid until it is
    revoked."""

    id: str
    name: str
    prefix: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    last_used_at: datetime | None = None
    expires_at: datetime | None = None

    def has_expired(self, at: datetime) -> bool:
        """Whether it is no longer valid at that moment."""
        return self.expires_at is not None and self.expires_at <= at


def create(session: Session, name: str, scopes: Iterable[str], lasts: timedelta | None = None) -> str:
    """Creates a key and returns it; only its hash is stored. Without `lasts` it does not expire."""
    plain = KEY_PREFIX + secrets.token_urlsafe(32)
    _add(session, plain, name, scopes, lasts)
    return plain


def ensure(session: Session, plain: str, name: str, scopes: Iterable[str]) -> bool:
    """Enters a key that was chosen elsewhere; False if it is known, even if revoked. Raises StoreError if too short."""
    if len(plain) < LEAST_CHARACTERS:
        raise StoreError(
            f"An API key needs at least {LEAST_CHARACTERS} characters; make one with `openssl rand -hex 32`."
        )
    return _add(session, plain, name, scopes, None)


def rotate(session: Session, key_id: str, *, grace: timedelta, lasts: timedelta | None = None) -> str:
    """Creates a successor with the same name and scopes; the old key is valid for `grace` longer. Without `lasts` the
    successor lives as long as the old key was meant to. Raises NotFoundError, and ConflictError for a key that is no
    longer valid."""
    row = row_of(session, ApiKey, "key", key_id)
    at = moment(session)
    if row.revoked_at is not None or row.as_view(KeyInfo).has_expired(at):
        raise ConflictError(f"The key {key_id} is no longer valid; create a new one.")
    if lasts is None and row.expires_at is not None:
        lasts = row.expires_at - row.created_at
    plain = create(session, row.name, row.scopes, lasts)
    ends = at + grace
    row.expires_at = ends if row.expires_at is None else min(row.expires_at, ends)
    mark_changed(session, Part.KEYS)
    return plain


def verify(session: Session, plain: str) -> KeyInfo | None:
    """The key, or None if it is unknown, revoked or expired. Writes nothing; `note_uses` does."""
    return _valid(_find(session, plain))


def is_known(session: Session, plain: str) -> bool:
    """Whether this key was ever entered, whatever became of it."""
    return _find(session, plain) is not None


def note_uses(session: Session, uses: Mapping[str, datetime]) -> None:
    """Stores when keys were last used, in the order of their ids: two processes cannot wait for each other."""
    for key_id, at in sorted(uses.items()):
        earlier = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < at)
        session.execute(update(ApiKey).where(ApiKey.id == key_id, earlier).values(last_used_at=at))


def revoke(session: Session, key_id: str) -> None:
    """Makes the key invalid. Raises NotFoundError."""
    row = row_of(session, ApiKey, "key", key_id)
    row.revoked_at = row.revoked_at or moment(session)
    mark_changed(session, Part.KEYS)


def list_(session: Session) -> list[KeyInfo]:
    """The keys that were not revoked, oldest first; those that have expired are among them."""
    query = select(ApiKey).where(ApiKey.revoked_at.is_(None)).order_by(ApiKey.created_at, ApiKey.id)
    return [row.as_view(KeyInfo) for row in session.scalars(query)]


def any(session: Session) -> bool:
    """Whether a key exists that was not revoked. One that has expired counts: its end must not open the service."""
    return session.scalars(select(ApiKey.id).where(ApiKey.revoked_at.is_(None)).limit(1)).first() is not None


def hash_of(secret: str) -> str:
    """What is stored of a secret of 256 random bits."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _find(session: Session, plain: str) -> ApiKey | None:
    return session.scalars(select(ApiKey).where(ApiKey.hash == hash_of(plain))).one_or_none()


def _valid(row: ApiKey | None) -> KeyInfo | None:
    """The key of the row, unless it was revoked or has expired."""
    if row is None or row.revoked_at is not None:
        return None
    found = row.as_view(KeyInfo)
    return None if found.has_expired(utc_now()) else found


def _add(session: Session, plain: str, name: str, scopes: Iterable[str], lasts: timedelta | None) -> bool:
    """Two processes may enter the same key at the same moment; the first one's row stays, and the other gets False."""
    at = moment(session)
    row = {
        "id": new_id(),
        "name": name,
        "prefix": plain[:SHOWN_CHARACTERS],
        "hash": hash_of(plain),
        "scopes": [Scope(scope).value for scope in scopes],
        "created_at": at,
        "expires_at": at + lasts if lasts else None,
    }
    mark_changed(session, Part.KEYS)
    insert = insert_into(session, ApiKey).values(row).on_conflict_do_nothing(index_elements=["hash"])
    return session.scalars(insert.returning(ApiKey.id)).one_or_none() is not None


def sign_in(session: Session, key_id: str, lasts: timedelta) -> str:
    """Signs a browser in with a key; returns the 256 random bits that its cookie is to hold. The database has only
    their hash, and forgets what has expired."""
    at = moment(session)
    token = secrets.token_urlsafe(32)
    session.execute(delete(SignIn).where(SignIn.expires_at <= at))
    session.add(SignIn(hash=hash_of(token), key_id=key_id, created_at=at, expires_at=at + lasts))
    return token


def signed_in(session: Session, token: str) -> KeyInfo | None:
    """The key with which a browser is signed in; None if it is not, any more, or if the key is no longer valid."""
    query = select(ApiKey).join(SignIn, SignIn.key_id == ApiKey.id)
    valid = SignIn.hash == hash_of(token), SignIn.expires_at > utc_now()
    return _valid(session.scalars(query.where(*valid)).one_or_none())


def sign_out(session: Session, token: str) -> None:
    """Signs a browser out. One that is not signed in changes nothing."""
    session.execute(delete(SignIn).where(SignIn.hash == hash_of(token)))
