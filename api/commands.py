"""What the commands for who runs a service share: the database of the settings, times, names, and the exit status."""

import argparse
import getpass
import re
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

from api.settings import ServiceSettings, SettingsError, read_settings
from optigpu.store.audit import Actor
from optigpu.store.database import Database
from optigpu.vocabulary import StoreError

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
