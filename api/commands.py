"""What the commands for who runs a service share: the database of the settings, and the exit status."""

import argparse
import sys
from collections.abc import Sequence

from api.settings import ServiceSettings, SettingsError, read_settings
from optigpu.store.database import Database
from optigpu.vocabulary import StoreError


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


def _open_database(settings: ServiceSettings) -> Database:
    """The database of the settings; that of an embedded service is migrated."""
    if settings.embedded:
        import migrations

        migrations.upgrade(settings.database_url)
    return Database(settings.database_url)
