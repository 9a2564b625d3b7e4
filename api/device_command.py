"""python -m api devices: invites devices, lists them, revokes them, asks them for new keys."""

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta

from api.commands import duration, operator, printable_name, run_command
from api.signatures import InviteCode, new_code
from optigpu.documents.administration import AuditAction
from optigpu.documents.devices import DeviceSource, DeviceView
from optigpu.store import audit, devices
from optigpu.store.database import Database
from optigpu.vocabulary import StoreError, harmless

LONGEST = timedelta(days=7)
ATTEMPTS = 20
MOST_INVITES = 5000
PAGE = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run_command(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m api devices", description="The edge devices of an OptiGPU service."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    invite = commands.add_parser("invite", help="let one device enrol, with a code that is shown once")
    invite.add_argument("--name", type=printable_name, help="a name for the device, to show in lists")
    invite.add_argument("--simulator", action="store_true", help="its reports are simulated and never rank")
    invite.add_argument(
        "--expires",
        type=duration(LONGEST),
        default="15m",
        help="how long the code is valid: 15m (the default), 2h, 1d",
    )
    invite.add_argument(
        "--count", type=_count, default=1, help="how many codes, one a line, each for one device (1)"
    )
    invite.set_defaults(run=_invite)
    commands.add_parser("list", help="list devices and open invitations").set_defaults(run=_list)
    for name, run, words in (
        ("revoke", _revoke, "refuse a device from now on; its reports stay"),
        ("rotate", _rotate, "ask a device for a new key when it next sends a message"),
    ):
        command = commands.add_parser(name, help=words)
        command.add_argument("id", help="the device's id, as the list shows it")
        command.set_defaults(run=run)
    return parser


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MOST_INVITES):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to {MOST_INVITES}")
    return int(text)


def _invite(database: Database, given: argparse.Namespace) -> None:
    source = DeviceSource.SIMULATOR if given.simulator else DeviceSource.DEVICE
    expires = ""
    for _ in range(given.count):
        code, expires = invite(database, name=given.name, source=source, lasts=given.expires)
        print(code.text)
    what = "this code" if given.count == 1 else "each of these codes"
    print(f"One device can enrol with {what} until {expires}; it is not shown again.", file=sys.stderr)


def invite(
    database: Database, *, name: str | None, source: DeviceSource, lasts: timedelta
) -> tuple[InviteCode, str]:
    """Opens an invitation; returns its code and until when it is valid. Raises StoreError if no public code is free."""
    for _ in range(ATTEMPTS):
        code = new_code()
        with database.write() as session:
            made = devices.add(
                session, code.public, code.verifier.hex(), name=name, source=source, lasts=lasts
            )
            if made is not None:
                details = {"source": source.value, "name": name, "expires_at": made.expires_at.isoformat()}
                audit.write(session, operator(), AuditAction.DEVICE_INVITED, code.public, details)
        if made is not None:
            return code, f"{made.expires_at:%Y-%m-%d %H:%M:%S} UTC"
    raise StoreError("Too many invitations are kept; try again when some have expired.")


def _list(database: Database, _: argparse.Namespace) -> None:
    with database.read() as session:
        invites = devices.list_open(session)
        cursor, more = None, True
        while more:
            page = devices.list_(session, limit=PAGE, cursor=cursor)
            for device in page.devices:
                print(harmless(_line(device)))
            cursor, more = page.next_cursor, page.next_cursor is not None
    for each in invites:
        until = f"{each.expires_at:%Y-%m-%d %H:%M:%S}"
        print(harmless(f"invitation {each.code}-...  {each.source}  until {until}  {each.name or ''}"))


def _line(device: DeviceView) -> str:
    seen = f"{device.last_seen_at:%Y-%m-%d %H:%M}" if device.last_seen_at else "never"
    state = "revoked" if device.revoked_at else ("rotating" if device.rotate else "active")
    words = (
        device.id,
        f"{state:<8}",
        f"{device.source:<9}",
        f"key {device.key_version}",
        f"last seen {seen:<16}",
    )
    return "  ".join([*words, device.board, device.name or ""]).rstrip()


def _revoke(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        devices.revoke(session, given.id)
        audit.write(session, operator(), AuditAction.DEVICE_REVOKED, given.id)


def _rotate(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        devices.request_rotation(session, given.id)
        audit.write(session, operator(), AuditAction.DEVICE_KEY_REQUESTED, given.id)
