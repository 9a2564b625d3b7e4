"""python -m api.keys: creates, lists and revokes the service's keys."""

import argparse
import sys
from collections.abc import Sequence

from api.commands import run_command
from optigpu.store import keys
from optigpu.store.database import Database
from optigpu.store.keys import Scope


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run_command(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m api.keys", description="The keys of an OptiGPU service.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    create = commands.add_parser("create", help="create a key and show it once")
    create.add_argument("name", help="a name to show in the list")
    create.add_argument(
        "--scope",
        action="append",
        choices=[scope.value for scope in Scope],
        help="read, submit (also reads) or admin (everything); read when none is given",
    )
    create.set_defaults(run=_create)
    commands.add_parser("list", help="list the keys that are valid").set_defaults(run=_list)
    revoke = commands.add_parser("revoke", help="revoke a key")
    revoke.add_argument("id", help="the key's id, as the list shows it")
    revoke.set_defaults(run=_revoke)
    return parser


def _create(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        plain = keys.create(session, given.name, given.scope or [Scope.READ])
    print(plain)
    print("Store this key: it is not shown again. Every call needs a key from now on.", file=sys.stderr)


def _list(database: Database, _: argparse.Namespace) -> None:
    with database.read() as session:
        known = keys.list_(session)
    for key in known:
        used = f"{key.last_used_at:%Y-%m-%d %H:%M}" if key.last_used_at else "never"
        print(f"{key.id}  {key.prefix}...  {','.join(key.scopes):<12}  last used {used:<16}  {key.name}")


def _revoke(database: Database, given: argparse.Namespace) -> None:
    with database.write() as session:
        keys.revoke(session, given.id)


if __name__ == "__main__":
    sys.exit(main())
