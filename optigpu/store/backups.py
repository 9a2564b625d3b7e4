"""All of the database in one file, and back: SQLite by its online backup, PostgreSQL by its client programs."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import URL, exists, inspect, select
from sqlalchemy.engine import Connection

from optigpu.store import postgresql_programs
from optigpu.store.database import address_of, engine_for, store_errors
from optigpu.store.tables import ApiKey, Base, Device, Job
from optigpu.vocabulary import StoreError

VERSION_TABLE = "alembic_version"
WHAT_MATTERS = (Job, ApiKey, Device)
"""A database with a row in one of these is not empty."""


def backup(url: str, file: Path) -> None:
    """Writes the database to a new file that only this user can read, while the service runs. Raises StoreError if the
    file exists, the database cannot be read, or PostgreSQL's programs are missing."""
    if file.exists():
        raise StoreError(f"{file} exists already; name another file.")
    partial = file.with_name(f"{file.name}.part")
    try:
        partial.touch(mode=0o600)
        _write(address_of(url), partial)
        os.replace(partial, file)
    except OSError as error:
        raise StoreError(f"{file} cannot be written ({error.strerror}).") from error
    finally:
        partial.unlink(missing_ok=True)


def restore(url: str, file: Path) -> None:
    """Puts what `backup` wrote in the place of all that the database holds; no part of it, if that fails. Raises
    StoreError for a file that is no backup, and for a database that is in use."""
    address = address_of(url)
    revision_of(url, file)
    engine_for(url).dispose()  # makes the folder of a SQLite file
    if address.get_backend_name() == "sqlite":
        _copy(file, Path(address.database or ""))
    else:
        postgresql_programs.load(address, file, [*Base.metadata.tables, VERSION_TABLE])


def revision_of(url: str, file: Path) -> str:
    """The revision of the tables in a backup for this kind of database. Raises StoreError for what is none."""
    if not file.is_file():
        raise StoreError(f"There is no file {file}.")
    if address_of(url).get_backend_name() == "postgresql":
        revision = postgresql_programs.revision_of(file, VERSION_TABLE)
    else:
        revision = _sqlite_revision(file)
    if revision is None:
        raise StoreError(f"{file} is no backup of OptiGPU for this kind of database.")
    return revision


def is_empty(url: str) -> bool:
    """Whether the database has no job, no key and no device; one without tables has none."""
    engine = engine_for(url)
    with store_errors(engine.url), engine.connect() as connection:
        empty = not any(_has_row(connection, kind) for kind in WHAT_MATTERS)
    engine.dispose()
    return empty


def _has_row(connection: Connection, kind: type[Base]) -> bool:
    if not inspect(connection).has_table(kind.__tablename__):
        return False
    return bool(connection.execute(select(exists(select(1).select_from(kind.__table__)))).scalar_one())


def _write(address: URL, file: Path) -> None:
    if address.get_backend_name() == "postgresql":
        postgresql_programs.dump(address, file)
        return
    source = Path(address.database or "")
    if not source.is_file():
        raise StoreError(f"There is no database at {source}; OPTIGPU_DATABASE_URL names another.")
    _copy(source, file)
    with _sqlite(file) as written:
        written.execute("PRAGMA journal_mode = DELETE")  # one file, without the two that WAL has beside it


def _copy(source: Path, target: Path) -> None:
    with _sqlite(source) as read, _sqlite(target, create=True) as written:
        read.backup(written)


@contextmanager
def _sqlite(file: Path, *, create: bool = False) -> Iterator[sqlite3.Connection]:
    """A file of SQLite. Raises StoreError for another one."""
    mode = "rwc" if create else "rw"
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode={mode}", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise StoreError(f"{file} cannot be used: {error}.") from error


def _sqlite_revision(file: Path) -> str | None:
    with _sqlite(file) as connection:
        (damage,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if damage != "ok":
            raise StoreError(f"{file} is damaged: {damage}.")
        known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (VERSION_TABLE,)).fetchone()
        row = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone() if known else None
    return None if row is None else str(row[0])
