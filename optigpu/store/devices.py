"""Edge devices: enrolment, what their signed requests leave behind, and what people ask about them. The secret half of
an invitation's code is never stored."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from optigpu.documents.devices import DevicePage, DeviceSource, DeviceStatus, DeviceView
from optigpu.store.database import KeyRefusedError, absent, moment, row_of
from optigpu.store.statements import insert_into, newest_first
from optigpu.store.tables import Device, DeviceBoot, DeviceInvite, DeviceKey
from optigpu.vocabulary import ConflictError, Frozen, new_id

REORDERED = 1024
"""How far a request's sequence may lie below the highest of its boot."""
FIRST_VERSION = 1


class NewDevice(Frozen):
    """A device that has proven its invitation."""

    name: str | None
    board: str
    source: DeviceSource
    firmware_sha256: str
    secret: bytes


class DeviceRequest(Frozen):
    """A request whose signature was right. `received_at` is when its body had arrived, by the database's clock."""

    device_id: str
    key_version: int
    boot_id: str
    sequence: int
    firmware_sha256: str
    clock_synchronised: bool
    received_at: datetime


class Entered(Frozen):
    """What is known of the device of a request that was entered. `newest` says that no later request of the device was
    entered before; `rotate` that it should make a new key."""

    newest: bool
    board: str
    source: DeviceSource
    rotate: bool


def enrol(session: Session, device: NewDevice, now: datetime) -> str:
    """Enters a device with its first key and returns its id."""
    device_id = new_id()
    session.add(Device(id=device_id, created_at=now, **device.model_dump(exclude={"secret"})))
    session.flush()
    session.add(DeviceKey(device_id=device_id, version=FIRST_VERSION, secret=device.secret, created_at=now))
    session.flush()
    return device_id


def secret_of(session: Session, device_id: str, version: int) -> bytes | None:
    """The key that a request is verified with; None for an unknown, replaced or revoked one."""
    query = (
        select(DeviceKey.secret)
        .join(Device, Device.id == DeviceKey.device_id)
        .where(DeviceKey.device_id == device_id, DeviceKey.version == version, Device.revoked_at.is_(None))
    )
    return session.scalars(query).one_or_none()


def enter(session: Session, request: DeviceRequest) -> Entered:
    """Locks the device, so that its requests follow each other, and notes this one. Raises KeyRefusedError if the key
    was replaced or revoked, ConflictError if the sequence is far below what the boot has reached."""
    device = _locked(session, request.device_id)
    key = session.get(DeviceKey, (request.device_id, request.key_version), populate_existing=True)
    if device.revoked_at is not None or key is None or key.secret is None:
        raise KeyRefusedError(f"The key {request.device_id}.{request.key_version} is no longer valid.")
    if key.first_used_at is None:
        key.first_used_at = request.received_at
        if key.version > FIRST_VERSION:  # the keys before it are forgotten, and what was asked for is done
            device.rotate_requested_at = None
            earlier = DeviceKey.device_id == device.id, DeviceKey.version < key.version
            session.execute(update(DeviceKey).where(*earlier).values(secret=None))
    newest = _note_boot(session, device, request)
    if newest:
        device.boot_id, device.last_seen_at = request.boot_id, request.received_at
        device.firmware_sha256 = request.firmware_sha256
        device.clock_synchronised = request.clock_synchronised
    session.flush()
    return device.as_view(Entered, newest=newest, rotate=device.rotate_requested_at is not None)


def note_status(session: Session, device_id: str, status: DeviceStatus) -> None:
    """What the device says of itself; of the newest request only."""
    changes = status.model_dump(exclude={"board"})
    session.execute(update(Device).where(Device.id == device_id).values(changes))


def put_key(session: Session, request: DeviceRequest, secret: bytes, *, newest: bool) -> int:
    """Enters the key that follows the one which signed the request, and returns its version. Until it is used another
    may take its place. Raises ConflictError for the key in use, and for a request after a later one: maybe a copy."""
    query = select(DeviceKey).where(DeviceKey.device_id == request.device_id)
    latest = session.scalars(query.order_by(DeviceKey.version.desc()).limit(1)).one()
    is_next = latest.version > request.key_version
    if latest.secret == secret:
        if is_next:
            return latest.version
        raise ConflictError("The new key is the one in use; make another.")
    if not newest:
        raise ConflictError("A later request of this device has arrived; send the new key again.")
    if not is_next:
        latest = DeviceKey(device_id=request.device_id, version=request.key_version + 1)
        session.add(latest)
    latest.secret, latest.created_at = secret, request.received_at
    session.flush()
    return latest.version


def get(session: Session, device_id: str) -> DeviceView:
    """The device. Raises NotFoundError."""
    return _views(session, [row_of(session, Device, "device", device_id)])[0]


def list_(session: Session, *, limit: int = 50, cursor: str | None = None) -> DevicePage:
    """A page of devices, newest first, revoked ones among them. Raises CursorError."""
    rows, following = newest_first(session, select(Device), Device.id, limit, cursor)
    return DevicePage(devices=_views(session, rows), next_cursor=following)


def revoke(session: Session, device_id: str) -> None:
    """Makes every key of the device invalid, for good. Its reports stay. Raises NotFoundError."""
    device = _locked(session, device_id)
    device.revoked_at = device.revoked_at or moment(session)
    session.execute(update(DeviceKey).where(DeviceKey.device_id == device_id).values(secret=None))


def request_rotation(session: Session, device_id: str) -> None:
    """The device is asked for a new key until it uses one. Raises NotFoundError, ConflictError for a revoked device."""
    device = _locked(session, device_id)
    if device.revoked_at is not None:
        raise ConflictError(f"The device {device_id} was revoked; invite it again.")
    device.rotate_requested_at = device.rotate_requested_at or moment(session)


def _locked(session: Session, device_id: str) -> Device:
    """The device's row, locked until the transaction ends."""
    query = select(Device).where(Device.id == device_id).with_for_update()
    row = session.scalars(query, execution_options={"populate_existing": True}).one_or_none()
    if row is None:
        raise absent(session, "device", device_id)
    return row


def _note_boot(session: Session, device: Device, request: DeviceRequest) -> bool:
    """Whether the request is the newest one of the device's newest boot."""
    boot = session.get(DeviceBoot, (device.id, request.boot_id), populate_existing=True)
    if boot is None:
        same = request.model_dump(include={"device_id", "boot_id", "sequence"})
        session.add(DeviceBoot(first_seen_at=request.received_at, **same))
        return True
    if request.sequence + REORDERED < boot.sequence:
        raise ConflictError(
            f"The sequence {request.sequence} is far below {boot.sequence}, which this boot has reached."
        )
    is_later = request.sequence > boot.sequence
    boot.sequence = max(boot.sequence, request.sequence)
    return is_later and device.boot_id == request.boot_id


def _views(session: Session, rows: Sequence[Device]) -> tuple[DeviceView, ...]:
    """Each with the version of the key that it uses."""
    used = DeviceKey.device_id.in_([row.id for row in rows]), DeviceKey.first_used_at.is_not(None)
    query = (
        select(DeviceKey.device_id, func.max(DeviceKey.version)).where(*used).group_by(DeviceKey.device_id)
    )
    versions = dict(session.execute(query).all())
    return tuple(
        row.as_view(
            DeviceView,
            key_version=versions.get(row.id, FIRST_VERSION),
            rotate=row.rotate_requested_at is not None,
        )
        for row in rows
    )


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
    row = {"code": code, "verifier": verifier, "name": name, "source": source}
    insert = insert_into(session, DeviceInvite).values(row | {"created_at": now, "expires_at": now + lasts})
    insert = insert.on_conflict_do_nothing(index_elements=["code"])
    added = session.scalars(insert.returning(DeviceInvite.code)).one_or_none()
    return None if added is None else session.get_one(DeviceInvite, code).as_view(Invite)


def open_at(session: Session, code: str, now: datetime) -> Invite | None:
    """The invitation with that public code, unless it has expired; its row is locked until the transaction ends."""
    query = select(DeviceInvite).where(DeviceInvite.code == code).with_for_update()
    row = session.scalars(query, execution_options={"populate_existing": True}).one_or_none()
    return None if row is None or row.expires_at <= now else row.as_view(Invite)


def close(session: Session, code: str, *, device_id: str, claim_digest: str, now: datetime) -> None:
    """The device has claimed it: the verifier is forgotten, and only the same claim is answered again."""
    row = session.get_one(DeviceInvite, code)
    row.verifier, row.claim_digest, row.device_id, row.claimed_at = None, claim_digest, device_id, now
    session.flush()


def list_open(session: Session) -> list[Invite]:
    """Those that can still be claimed, oldest first."""
    is_open = DeviceInvite.expires_at > moment(session), DeviceInvite.claimed_at.is_(None)
    query = select(DeviceInvite).where(*is_open).order_by(DeviceInvite.created_at, DeviceInvite.code)
    return [row.as_view(Invite) for row in session.scalars(query)]
