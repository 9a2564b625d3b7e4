"""All of the database in one file, and back: SQLite by its online backup, PostgreSQL by its client programs."""

import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import URL, inspect, select

from optigpu.store.database import address_of, engine_for, store_errors
from optigpu.store.tables import ApiKey, Base, Device, Job
from optigpu.vocabulary import StoreError

LOCK_WAIT = "10s"
PLAIN = ("--no-owner", "--no-privileges")
"""The tables belong to whoever restores them."""
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
        _load(address, file)


def revision_of(url: str, file: Path) -> str:
    """The revision of the tables in a backup for this kind of database. Raises StoreError for what is none."""
    if not file.is_file():
        raise StoreError(f"There is no file {file}.")
    is_postgresql = address_of(url).get_backend_name() == "postgresql"
    revision = _postgresql_revision(file) if is_postgresql else _sqlite_revision(file)
    if revision is None:
        raise StoreError(f"{file} is no backup of OptiGPU for this kind of database.")
    return revision


def is_empty(url: str) -> bool:
    """Whether the database has no job, no key and no device; one without tables has none."""
    engine = engine_for(url)
    with store_errors(engine.url), engine.connect() as connection:
        there = [kind for kind in WHAT_MATTERS if inspect(connection).has_table(kind.__tablename__)]
        empty = not any(connection.execute(select(1).select_from(kind).limit(1)).first() for kind in there)
    engine.dispose()
    return empty


def _write(address: URL, file: Path) -> None:
    if address.get_backend_name() == "postgresql":
        _run("pg_dump", ["--format=custom", *PLAIN, f"--file={file}", _database(address)], _secrets(address))
        return
    source = Path(address.database or "")
    if not source.is_file():
        raise StoreError(f"There is no database at {source}; OPTIGPU_DATABASE_URL names another.")
    _copy(source, file)
    with _sqlite(file) as written:
        written.execute("PRAGMA journal_mode = DELETE")  # one file, without the two that WAL has beside it


def _load(address: URL, file: Path) -> None:
    """Replaces the tables by those of the file, in one transaction. Raises StoreError, and changes nothing then."""
    names = ", ".join(f'"{name}"' for name in (*Base.metadata.tables, VERSION_TABLE))
    with TemporaryDirectory() as folder:
        script = Path(folder) / "restore.sql"
        _run("pg_restore", [*PLAIN, f"--file={script}", str(file)], {})
        whole = ["--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1"]
        waits = f"--command=SET lock_timeout = '{LOCK_WAIT}'"
        replaces = [waits, f"--command=DROP TABLE IF EXISTS {names} CASCADE", f"--file={script}"]
        _run("psql", [*whole, *replaces, _database(address)], _secrets(address))


def _postgresql_revision(file: Path) -> str | None:
    """The one row of the table with the schema's revision in such a file; None without that table."""
    listed = _run("pg_restore", ["--data-only", f"--table={VERSION_TABLE}", "--file=-", str(file)], {})
    found = re.search(rf"^COPY \S*{VERSION_TABLE} .*;\n(\S+)$", listed, re.MULTILINE)
    return found[1] if found and found[1] != "\\." else None


def _database(address: URL) -> str:
    """The database as libpq names it; the password is in the environment, because every user can list arguments."""
    plain = address.set(drivername="postgresql", password=None)
    return f"--dbname={plain.render_as_string(hide_password=False)}"


def _secrets(address: URL) -> Mapping[str, str]:
    return {"PGPASSWORD": str(address.password)} if address.password else {}


def _run(program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """What one of PostgreSQL's client programs prints. Raises StoreError, with its first error, if it fails."""
    found = shutil.which(program)
    if found is None:
        raise StoreError(
            f"{program} is missing; install PostgreSQL's client programs, of the server's version or a later one "
            "(Debian and Ubuntu: apt-get install postgresql-client)."
        )
    done = subprocess.run(
        [found, *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
        first = next((line for line in lines if "error" in line.lower()), lines[-1])
        cause = re.sub(r"^\w+: (error: )?", "", first).rstrip(".")
        raise StoreError(f"{program} failed: {cause}. The database is as it was.")
    return done.stdout


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
