"""python -m api backup FILE and python -m api restore FILE: all of the database in one file, and back."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from api.settings import SettingsError, read_settings
from optigpu.store import backups
from optigpu.vocabulary import StoreError


def backup(arguments: Sequence[str]) -> int:
    """Writes a backup; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m api backup",
        description="Writes all of the database to a file, while the service runs: jobs, results, samples, keys.",
    )
    parser.add_argument("file", type=Path, help="the file to write; it must not exist")
    return _done(_backup, parser.parse_args(arguments))


def restore(arguments: Sequence[str]) -> int:
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
