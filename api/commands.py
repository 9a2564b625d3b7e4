"""Commands for who runs a service: `python -m api keys`, `devices`, `audit`, `backup FILE` and `restore FILE`."""

import argparse
import getpass
import json
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from api.device_identity import InviteCode, new_code
from api.settings import ServiceSettings, SettingsError, read_settings
from optigpu.documents.administration import AuditAction, AuditView
from optigpu.documents.devices import DeviceSource, DeviceView
from optigpu.store import audit, backups, devices, keys
from optigpu.store.audit import Actor
from optigpu.store.database import Database, Session
from optigpu.store.keys import KeyInfo, Scope
from optigpu.vocabulary import Document, StoreError, harmless, utc_now

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Calls the command's default `run` with the database and what was given.

    Returns the exit status: 0, or 1 if settings or database cannot be used, with the reason on stderr.
    """
    given = parser.parse_args(arguments)
    try:
        database = _open_database(read_settings())
        try:
            given.run(database, given)
        finally:
            database.close()
    except (SettingsError, StoreError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def operator() -> Actor:
    """Who runs the command, as the audit log names them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "unknown"
    return Actor(name=f"{user} at the command line")


def duration(most: timedelta) -> Callable[[str], timedelta]:
    """A reader of times such as 15m, 2h or 1d, of at most so long. It raises argparse.ArgumentTypeError."""

    def read(text: str) -> timedelta:
        match = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
        lasts = timedelta(**{UNITS[match[2]]: int(match[1])}) if match else None
        if lasts is None or lasts > most:
            raise argparse.ArgumentTypeError(
                f"{text} is not a time such as 15m, 2h or 1d, of {most.days} days at the most"
            )
        return lasts

    return read


def printable_name(text: str) -> str:
    """The name itself. Raises argparse.ArgumentTypeError unless it has 1 to 64 printable ASCII characters."""
    if not re.fullmatch(r"[ -~]{1,64}", text):
        raise argparse.ArgumentTypeError("a name has 1 to 64 printable ASCII characters")
    return text


def _open_database(settings: ServiceSettings) -> Database:
    """The database of the settings; that of an embedded service is migrated."""
    if settings.embedded:
        import migrations

        migrations.upgrade(settings.database_url)
    return Database(settings.database_url)


LONGEST_LIFE = timedelta(days=3650)
LONGEST_GRACE = timedelta(days=30)
GRACE = "1d"


def keys_command(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run_command(_keys_parser(), arguments)


def _keys_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m api keys", description="The keys of an OptiGPU service.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    create = commands.add_parser("create", help="create a key and show it once")
    create.add_argument("name", type=printable_name, help="a name to show in the list")
    create.add_argument(
        "--scope",
        action="append",
        choices=[scope.value for scope in Scope],
        help="read, submit (also reads) or admin (everything); read when none is given",
    )
    _add_expiry(create, "how long it is valid: 90d, 12h; without it until it is revoked")
    create.set_defaults(run=_create_key)
    commands.add_parser("list", help="list the keys that were not revoked").set_defaults(run=_list_keys)
    revoke = commands.add_parser("revoke", help="revoke a key at once")
    revoke.set_defaults(run=_revoke_key)
    rotate = commands.add_parser("rotate", help="create a key's successor and let the old key end soon")
    rotate.add_argument(
        "--grace",
        type=duration(LONGEST_GRACE),
        default=GRACE,
        help=f"how long the old key is still valid: 2h, {GRACE} (the default)",
    )
    _add_expiry(rotate, "how long the successor is valid; without it as long as the old key was meant to be")
    rotate.set_defaults(run=_rotate_key)
    for command in (revoke, rotate):
        command.add_argument("id", help="the key's id, as the list shows it")
    return parser


def _add_expiry(command: argparse.ArgumentParser, words: str) -> None:
    command.add_argument("--expires", type=duration(LONGEST_LIFE), metavar="TIME", help=words)


def _create_key(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        plain = keys.create(session, given.name, given.scope or [Scope.READ], given.expires)
        _record_created(session, _made_key(session, plain))
    print(plain)
    print("Store this key: it is not shown again. Every call needs a key from now on.", file=sys.stderr)


def _list_keys(database: Database, _: argparse.Namespace) -> None:
    with database.read() as session:
        known = keys.list_(session)
    for key in known:
        used = f"{key.last_used_at:%Y-%m-%d %H:%M}" if key.last_used_at else "never"
        scopes = f"{','.join(key.scopes):<12}"
        line = f"{key.id}  {key.prefix}...  {scopes}  last used {used:<16}  {_ends(key):<24}  {key.name}"
        print(harmless(line))


def _revoke_key(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        keys.revoke(session, given.id)
        audit.write(session, operator(), AuditAction.KEY_REVOKED, given.id)


def _rotate_key(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        plain = keys.rotate(session, given.id, grace=given.grace, lasts=given.expires)
        successor = _made_key(session, plain)
        _record_created(session, successor)
        audit.write(session, operator(), AuditAction.KEY_ROTATED, given.id, {"successor": successor.id})
        old = next(key for key in keys.list_(session) if key.id == given.id)
    print(plain)
    print(
        f"Store this key: it is not shown again. The old one is valid until {_minute(old.expires_at)}.",
        file=sys.stderr,
    )


def _made_key(session: Session, plain: str) -> KeyInfo:
    made = keys.verify(session, plain)
    assert made is not None, "it was created in this transaction"
    return made


def _record_created(session: Session, key: KeyInfo) -> None:
    details: Document = {
        "name": key.name,
        "scopes": list(key.scopes),
        "expires_at": key.expires_at.isoformat() if key.expires_at else None,
    }
    audit.write(session, operator(), AuditAction.KEY_CREATED, key.id, details)


def _ends(key: KeyInfo) -> str:
    if key.expires_at is None:
        return "does not expire"
    verb = "expired" if key.expires_at <= utc_now() else "expires"
    return f"{verb} {key.expires_at:%Y-%m-%d %H:%M}"


def _minute(at: datetime | None) -> str:
    assert at is not None, "a key that was rotated has an end"
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


LONGEST_INVITE = timedelta(days=7)
ATTEMPTS = 20
MOST_INVITES = 5000
PAGE = 200


def devices_command(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run_command(_devices_parser(), arguments)


def _devices_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m api devices", description="The edge devices of an OptiGPU service."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    invite = commands.add_parser("invite", help="let one device enrol, with a code that is shown once")
    invite.add_argument("--name", type=printable_name, help="a name for the device, to show in lists")
    invite.add_argument("--simulator", action="store_true", help="its reports are simulated and never rank")
    invite.add_argument(
        "--expires",
        type=duration(LONGEST_INVITE),
        default="15m",
        help="how long the code is valid: 15m (the default), 2h, 1d",
    )
    invite.add_argument(
        "--count", type=_invite_count, default=1, help="how many codes, one a line, each for one device (1)"
    )
    invite.set_defaults(run=_invite)
    commands.add_parser("list", help="list devices and open invitations").set_defaults(run=_list_devices)
    for name, run, words in (
        ("revoke", _revoke_device, "refuse a device from now on; its reports stay"),
        ("rotate", _rotate_device, "ask a device for a new key when it next sends a message"),
    ):
        command = commands.add_parser(name, help=words)
        command.add_argument("id", help="the device's id, as the list shows it")
        command.set_defaults(run=run)
    return parser


def _invite_count(text: str) -> int:
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


def _list_devices(database: Database, _: argparse.Namespace) -> None:
    with database.read() as session:
        invites = devices.list_open(session)
        cursor, more = None, True
        while more:
            page = devices.list_(session, limit=PAGE, cursor=cursor)
            for device in page.devices:
                print(harmless(_device_line(device)))
            cursor, more = page.next_cursor, page.next_cursor is not None
    for each in invites:
        until = f"{each.expires_at:%Y-%m-%d %H:%M:%S}"
        print(harmless(f"invitation {each.code}-...  {each.source}  until {until}  {each.name or ''}"))


def _device_line(device: DeviceView) -> str:
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


def _revoke_device(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        devices.revoke(session, given.id)
        audit.write(session, operator(), AuditAction.DEVICE_REVOKED, given.id)


def _rotate_device(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        devices.request_rotation(session, given.id)
        audit.write(session, operator(), AuditAction.DEVICE_KEY_REQUESTED, given.id)


MOST_CHANGES = 100_000


def audit_command(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run_command(_audit_parser(), arguments)


def _audit_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m api audit", description="Who changed what in an OptiGPU service, the newest first."
    )
    parser.add_argument("--limit", type=_change_count, default=50, help="how many changes to print (50)")
    parser.add_argument(
        "--target", help="only the changes of this: the id of a job, a key, a device, a webhook"
    )
    parser.set_defaults(run=_print_changes)
    return parser


def _change_count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MOST_CHANGES):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to {MOST_CHANGES}")
    return int(text)


def _print_changes(database: Database, given: argparse.Namespace) -> None:
    left, cursor = given.limit, None
    with database.read() as session:
        while left:
            page = audit.list_(session, target=given.target, limit=min(left, PAGE), cursor=cursor)
            for change in page.changes:
                print(harmless(_change_line(change)))
            left, cursor = left - len(page.changes), page.next_cursor
            if cursor is None:
                return


def _change_line(change: AuditView) -> str:
    where = f" from {change.address}" if change.address else ""
    details = f"  {json.dumps(change.details)}" if change.details else ""
    return f"{change.at:%Y-%m-%d %H:%M:%S}  {change.action:<20}  {change.target}  by {change.name}{where}{details}"


def backup_command(arguments: Sequence[str]) -> int:
    """Writes a backup; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m api backup",
        description="Writes all of the database to a file, while the service runs: jobs, results, samples, keys.",
    )
    parser.add_argument("file", type=Path, help="the file to write; it must not exist")
    return _done(_backup, parser.parse_args(arguments))


def restore_command(arguments: Sequence[str]) -> int:
    """Reads a backup; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m api restore",
        description="Puts a backup in the place of the database, and brings its tables to this version. Stop the "
        "service and its workers first.",
    )
    parser.add_argument("file", type=Path, help="a file that `python -m api backup` wrote")
    parser.add_argument("--replace", action="store_true", help="also if the database is not empty")
    return _done(_restore, parser.parse_args(arguments))


def _done(run: Callable[[argparse.Namespace], str], given: argparse.Namespace) -> int:
    try:
        print(run(given))
    except (SettingsError, StoreError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _backup(given: argparse.Namespace) -> str:
    file: Path = given.file
    backups.backup(read_settings().database_url, file)
    return f"{file} holds all of the database, in {file.stat().st_size} bytes."


def _restore(given: argparse.Namespace) -> str:
    import migrations

    url = read_settings().database_url
    if why := migrations.unknown(backups.revision_of(url, given.file)):
        raise StoreError(f"{given.file} cannot be restored: {why}")
    if not given.replace and not backups.is_empty(url):
        raise StoreError(
            "The database is not empty, and a restore would replace all of it; say so with --replace."
        )
    backups.restore(url, given.file)
    migrations.upgrade(url)
    return f"The database is that of {given.file}."
