"""The service's API keys: each is shown once, and only its hash is stored."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from optigpu.store.database import moment
from optigpu.store.statements import insert_into
from optigpu.store.tables import ApiKey
from optigpu.vocabulary import Frozen, NotFoundError, StoreError, new_id

KEY_PREFIX = "og_"
SHOWN_CHARACTERS = 7
LEAST_CHARACTERS = 20


class Scope(StrEnum):
    """What a key allows; each one contains those before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


class KeyInfo(Frozen):
    """A key without its secret. `prefix` are its first characters, for people to tell keys apart."""

    id: str
    name: str
    prefix: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    last_used_at: datetime | None = None


def create(session: Session, name: str, scopes: Iterable[str]) -> str:
    """Creates a key and returns it; only its hash is stored."""
    plain = KEY_PREFIX + secrets.token_urlsafe(32)
    _add(session, plain, name, scopes)
    return plain


def ensure(session: Session, plain: str, name: str, scopes: Iterable[str]) -> None:
    """Enters a key that was chosen elsewhere; changes nothing if it is known, revoked or not.

    Raises StoreError when it is too short to be a secret.
    """
    if len(plain) < LEAST_CHARACTERS:
        raise StoreError(
            f"An API key needs at least {LEAST_CHARACTERS} characters; make one with `openssl rand -hex 32`."
        )
    _add(session, plain, name, scopes)


def verify(session: Session, plain: str) -> KeyInfo | None:
    """The key, or None if it is unknown or revoked. Writes nothing; `note_uses` does."""
    row = _find(session, plain)
    if row is None or not hmac.compare_digest(row.hash, _hash(plain)) or row.revoked_at is not None:
        return None
    return _info(row)


def is_known(session: Session, plain: str) -> bool:
    """Whether this key was ever entered, revoked or not."""
    return _find(session, plain) is not None


def note_uses(session: Session, uses: Mapping[str, datetime]) -> None:
    """Stores when keys, by id, were last used. An earlier time changes nothing.

    In the order of the ids, so that two processes cannot wait for each other.
    """
    for key_id, at in sorted(uses.items()):
        earlier = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < at)
        session.execute(update(ApiKey).where(ApiKey.id == key_id, earlier).values(last_used_at=at))


def revoke(session: Session, key_id: str) -> None:
    """Makes the key invalid. Raises NotFoundError."""
    row = session.get(ApiKey, key_id)
    if row is None:
        raise NotFoundError(f"There is no key {key_id}.")
    row.revoked_at = row.revoked_at or moment(session)


def list_(session: Session) -> list[KeyInfo]:
    """The keys that are valid, oldest first."""
    rows = session.scalars(
        select(ApiKey).where(ApiKey.revoked_at.is_(None)).order_by(ApiKey.created_at, ApiKey.id)
    )
    return [_info(row) for row in rows]


def any(session: Session) -> bool:
    """Whether a valid key exists."""
    return session.scalars(select(ApiKey.id).where(ApiKey.revoked_at.is_(None)).limit(1)).first() is not None


def _hash(plain: str) -> str:
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()


def _find(session: Session, plain: str) -> ApiKey | None:
    return session.scalars(select(ApiKey).where(ApiKey.hash == _hash(plain))).one_or_none()


def _add(session: Session, plain: str, name: str, scopes: Iterable[str]) -> None:
    """Two processes may enter the same key at the same moment; the first one's row stays."""
    row = {
        "id": new_id(),
        "name": name,
        "prefix": plain[:SHOWN_CHARACTERS],
        "hash": _hash(plain),
        "scopes": [Scope(scope).value for scope in scopes],
        "created_at": moment(session),
    }
    session.execute(insert_into(session, ApiKey).values(row).on_conflict_do_nothing(index_elements=["hash"]))


def _info(row: ApiKey) -> KeyInfo:
    scopes = tuple(Scope(scope) for scope in row.scopes)
    return KeyInfo(
        id=row.id,
        name=row.name,
        prefix=row.prefix,
        scopes=scopes,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
    )
