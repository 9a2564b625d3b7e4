"""python -m api audit: prints the audit log."""

import argparse
import json
from collections.abc import Sequence

from api.commands import run_command
from optigpu.documents.administration import AuditView
from optigpu.store import audit
from optigpu.store.database import Database
from optigpu.vocabulary import harmless

PAGE = 200
MOST = 100_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run_command(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m api audit", description="Who changed what in an OptiGPU service, the newest first."
    )
    parser.add_argument("--limit", type=_count, default=50, help="how many changes to print (50)")
    parser.add_argument(
        "--target", help="only the changes of this: the id of a job, a key, a device, a webhook"
    )
    parser.set_defaults(run=_print)
    return parser


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MOST):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to {MOST}")
    return int(text)


def _print(database: Database, given: argparse.Namespace) -> None:
    left, cursor = given.limit, None
    with database.read() as session:
        while left:
            page = audit.list_(session, target=given.target, limit=min(left, PAGE), cursor=cursor)
            for change in page.changes:
                print(harmless(_line(change)))
            left, cursor = left - len(page.changes), page.next_cursor
            if cursor is None:
                return


def _line(change: AuditView) -> str:
    where = f" from {change.address}" if change.address else ""
    details = f"  {json.dumps(change.details)}" if change.details else ""
    return f"{change.at:%Y-%m-%d %H:%M:%S}  {change.action:<20}  {change.target}  by {change.name}{where}{details}"
