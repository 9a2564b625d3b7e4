"""PostgreSQL's own client programs, which write a database to a file and read it back."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import URL

from optigpu.vocabulary import StoreError

LOCK_WAIT = "10s"
PLAIN = ("--no-owner", "--no-privileges")
"""The tables belong to whoever restores them."""


def dump(address: URL, file: Path) -> None:
    """Writes the database to a file in PostgreSQL's custom format. Raises StoreError."""
    _run("pg_dump", ["--format=custom", *PLAIN, f"--file={file}", _database(address)], _secrets(address))


def load(address: URL, file: Path, tables: Sequence[str]) -> None:
    """Replaces these tables by those of the file, in one transaction. Raises StoreError, and changes nothing then."""
    names = ", ".join(f'"{name}"' for name in tables)
    with TemporaryDirectory() as folder:
        script = Path(folder) / "restore.sql"
        _run("pg_restore", [*PLAIN, f"--file={script}", str(file)], {})
        whole = ["--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1"]
        waits = f"--command=SET lock_timeout = '{LOCK_WAIT}'"
        replaces = [waits, f"--command=DROP TABLE IF EXISTS {names} CASCADE", f"--file={script}"]
        _run("psql", [*whole, *replaces, _database(address)], _secrets(address))


def revision_of(file: Path, table: str) -> str | None:
    """The one row of the table with the schema's revision in such a file; None without that table."""
    listed = _run("pg_restore", ["--data-only", f"--table={table}", "--file=-", str(file)], {})
    found = re.search(rf"^COPY \S*{table} .*;\n(\S+)$", listed, re.MULTILINE)
    return found[1] if found and found[1] != "\\." else None


def _database(address: URL) -> str:
    """The database as libpq names it; the password is in the environment, because every user can list arguments."""
    plain = address.set(drivername="postgresql", password=None)
    return f"--dbname={plain.render_as_string(hide_password=False)}"


def _secrets(address: URL) -> Mapping[str, str]:
    return {"PGPASSWORD": str(address.password)} if address.password else {}


def _run(program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """What the program prints. Raises StoreError if it is missing or fails."""
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
        raise StoreError(f"{program} failed: {_cause(done.stderr)}. The database is as it was.")
    return done.stdout


def _cause(printed: str) -> str:
    """The first error of what a program printed; what follows it are consequences."""
    lines = [line for line in printed.splitlines() if line.strip()]
    first = next(
        (line for line in lines if "error" in line.lower()), lines[-1] if lines else "it says nothing"
    )
    return re.sub(r"^\w+: (error: )?", "", first).rstrip(".")
