"""Invitations to enrol a device: each is for one device and expires. The secret half of its code is never stored."""

from datetime import datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from optigpu.documents.devices import DeviceSource
from optigpu.store.database import moment
from optigpu.store.statements import insert_into
from optigpu.store.tables import DeviceInvite
from optigpu.vocabulary import Frozen

FORGOTTEN_AFTER = timedelta(days=7)
"""From when on an expired invitation's public code may be used again."""


class Invite(Frozen):
    """An invitation. `verifier` and `claim_digest` are as in the table, `device_id` the device that claimed it."""

    code: str
    name: str | None
    source: DeviceSource
    created_at: datetime
    expires_at: datetime
    verifier: str | None
    claim_digest: str | None
    device_id: str | None


def add(
    session: Session, code: str, verifier: str, *, name: str | None, source: DeviceSource, lasts: timedelta
) -> Invite | None:
    """Enters an invitation; None if its public code is taken. Removes those that expired a week ago."""
    now = moment(session)
    session.execute(delete(DeviceInvite).where(DeviceInvite.expires_at < now - FORGOTTEN_AFTER))
    row = {
        "code": code,
        "verifier": verifier,
        "name": name,
        "source": source,
        "created_at": now,
        "expires_at": now + lasts,
    }
    insert = insert_into(session, DeviceInvite).values(row).on_conflict_do_nothing(index_elements=["code"])
    added = session.scalars(insert.returning(DeviceInvite.code)).one_or_none()
    return None if added is None else _invite(session.get_one(DeviceInvite, code))


def open_at(session: Session, code: str, now: datetime) -> Invite | None:
    """The invitation with that public code, unless it has expired; its row is locked until the transaction ends."""
    query = select(DeviceInvite).where(DeviceInvite.code == code).with_for_update()
    row = session.scalars(query, execution_options={"populate_existing": True}).one_or_none()
    return None if row is None or row.expires_at <= now else _invite(row)


def close(session: Session, code: str, *, device_id: str, claim_digest: str, now: datetime) -> None:
    """The device has claimed it: the verifier is forgotten, and only the same claim is answered again."""
    row = session.get_one(DeviceInvite, code)
    row.verifier, row.claim_digest, row.device_id, row.claimed_at = None, claim_digest, device_id, now
    session.flush()


def list_open(session: Session) -> list[Invite]:
    """Those that can still be claimed, oldest first."""
    now = moment(session)
    query = (
        select(DeviceInvite)
        .where(DeviceInvite.expires_at > now, DeviceInvite.claimed_at.is_(None))
        .order_by(DeviceInvite.created_at, DeviceInvite.code)
    )
    return [_invite(row) for row in session.scalars(query)]


def _invite(row: DeviceInvite) -> Invite:
    return Invite(
        code=row.code,
        name=row.name,
        source=row.source,
        created_at=row.created_at,
        expires_at=row.expires_at,
        verifier=row.verifier,
        claim_digest=row.claim_digest,
        device_id=row.device_id,
    )
