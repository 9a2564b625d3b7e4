"""Browsers that are signed in with a key: each for some hours, and no longer than its key is valid. The cookie holds
256 random bits, and the database only their hash."""

import hashlib
import secrets
from datetime import timedelta

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from optigpu.store import keys
from optigpu.store.database import moment
from optigpu.store.keys import KeyInfo
from optigpu.store.tables import ApiKey, SignIn
from optigpu.vocabulary import utc_now


def begin(session: Session, key_id: str, lasts: timedelta) -> str:
    """Signs in; returns what the cookie is to hold. Those that have expired are forgotten."""
    at = moment(session)
    token = secrets.token_urlsafe(32)
    session.execute(delete(SignIn).where(SignIn.expires_at <= at))
    session.add(SignIn(hash=_hash(token), key_id=key_id, created_at=at, expires_at=at + lasts))
    return token


def find(session: Session, token: str) -> KeyInfo | None:
    """The key with which a browser is signed in; None if it is not, any more, or if the key is no longer valid."""
    query = select(ApiKey).join(SignIn, SignIn.key_id == ApiKey.id)
    now = utc_now()
    valid = SignIn.hash == _hash(token), SignIn.expires_at > now, ApiKey.revoked_at.is_(None)
    row = session.scalars(query.where(*valid)).one_or_none()
    key = None if row is None else keys.info_of(row)
    return None if key is None or key.has_expired(now) else key


def end(session: Session, token: str) -> None:
    """Signs out. A browser that is not signed in changes nothing."""
    session.execute(delete(SignIn).where(SignIn.hash == _hash(token)))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
