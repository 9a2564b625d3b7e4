"""python -m api keys: creates, lists, revokes and rotates the service's keys."""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta

from api.commands import duration, operator, printable_name, run_command
from optigpu.documents.administration import AuditAction
from optigpu.store import audit, keys
from optigpu.store.database import Database, Session
from optigpu.store.keys import KeyInfo, Scope
from optigpu.vocabulary import Document, harmless, utc_now

LONGEST_LIFE = timedelta(days=3650)
LONGEST_GRACE = timedelta(days=30)
GRACE = "1d"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run_command(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
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
    create.set_defaults(run=_create)
    commands.add_parser("list", help="list the keys that were not revoked").set_defaults(run=_list)
    revoke = commands.add_parser("revoke", help="revoke a key at once")
    revoke.set_defaults(run=_revoke)
    rotate = commands.add_parser("rotate", help="create a key's successor and let the old key end soon")
    rotate.add_argument(
        "--grace",
        type=duration(LONGEST_GRACE),
        default=GRACE,
        help=f"how long the old key is still valid: 2h, {GRACE} (the default)",
    )
    _add_expiry(rotate, "how long the successor is valid; without it as long as the old key was meant to be")
    rotate.set_defaults(run=_rotate)
    for command in (revoke, rotate):
        command.add_argument("id", help="the key's id, as the list shows it")
    return parser


def _add_expiry(command: argparse.ArgumentParser, words: str) -> None:
    command.add_argument("--expires", type=duration(LONGEST_LIFE), metavar="TIME", help=words)


def _create(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        plain = keys.create(session, given.name, given.scope or [Scope.READ], given.expires)
        _record_created(session, _made(session, plain))
    print(plain)
    print("Store this key: it is not shown again. Every call needs a key from now on.", file=sys.stderr)


def _list(database: Database, _: argparse.Namespace) -> None:
    with database.read() as session:
        known = keys.list_(session)
    for key in known:
        used = f"{key.last_used_at:%Y-%m-%d %H:%M}" if key.last_used_at else "never"
        scopes = f"{','.join(key.scopes):<12}"
        line = f"{key.id}  {key.prefix}...  {scopes}  last used {used:<16}  {_ends(key):<24}  {key.name}"
        print(harmless(line))


def _revoke(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        keys.revoke(session, given.id)
        audit.write(session, operator(), AuditAction.KEY_REVOKED, given.id)


def _rotate(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        plain = keys.rotate(session, given.id, grace=given.grace, lasts=given.expires)
        successor = _made(session, plain)
        _record_created(session, successor)
        audit.write(session, operator(), AuditAction.KEY_ROTATED, given.id, {"successor": successor.id})
        old = next(key for key in keys.list_(session) if key.id == given.id)
    print(plain)
    print(
        f"Store this key: it is not shown again. The old one is valid until {_minute(old.expires_at)}.",
        file=sys.stderr,
    )


def _made(session: Session, plain: str) -> KeyInfo:
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
