"""The connection to the results database, PostgreSQL or a SQLite file: its errors, and the revisions of its parts.

A part of the database has another revision after each transaction that changed it. Whoever keeps what was read, keeps
the revision with it, and asks for the revision alone the next time. A revision is random, so that a database that was
restored from a backup never has one again that stood for something else.
"""

import os
import select as select_
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, make_url, select
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    DisconnectionError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
    StatementError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session as Session  # offered to the worker, which imports no SQLAlchemy
from sqlalchemy.orm import sessionmaker

from optigpu.paths import data_dir
from optigpu.store.statements import insert_into
from optigpu.store.tables import Revision, Tombstone
from optigpu.vocabulary import NotFoundError, OptiGPUError, StoreError, new_id, utc_now

Row = TypeVar("Row")


class WithdrawnError(NotFoundError):
    """The result or the job was withdrawn; the text says when and why."""


class KeyRefusedError(StoreError):
    """The key of a device was replaced or revoked."""


class StoreUnavailableError(StoreError):
    """The database cannot be reached, or its tables are not those of this version."""


def row_of(session: Session, table: type[Row], kind: str, id_: str) -> Row:
    """The row with that id, which is called a `kind` in the error. Raises NotFoundError, as `absent` has it."""
    row = session.get(table, id_)
    if row is None:
        raise absent(session, kind, id_)
    return row


def absent(session: Session, kind: str, id_: str) -> NotFoundError:
    """The error for what is not there: WithdrawnError with the reason for a result or a job that was withdrawn."""
    stone = session.get(Tombstone, id_)
    if stone is None or stone.kind != kind:
        return NotFoundError(f"There is no {kind} {id_}.")
    return WithdrawnError(f"The {kind} {id_} was withdrawn on {stone.withdrawn_at:%Y-%m-%d}: {stone.reason}")


class Part(StrEnum):
    """A part of the database that has revisions."""

    KEYS = "keys"
    LEADERBOARD = "leaderboard"


Revisions = Mapping[str, str]
"""By part; a part that never changed has none."""


def mark_changed(session: Session, part: Part) -> None:
    """This transaction changes the part: `renew` gives it another revision when the transaction ends."""
    session.info.setdefault(Part, set()).add(part)


def renew_revisions(session: Session) -> None:
    """Gives each part that changed its new revision.

    It is the last statement of a transaction: whoever else changes the part waits for the commit. In the order of the
    names, so that no two transactions wait for each other.
    """
    for part in sorted(session.info.pop(Part, ())):
        row = insert_into(session, Revision).values(part=part, revision=new_id())
        session.execute(
            row.on_conflict_do_update(index_elements=["part"], set_={"revision": row.excluded.revision})
        )


def current_revisions(connection: Connection) -> Revisions:
    """The revisions as they are now. Every call waits for this, and a session takes twice as long."""
    return dict(connection.execute(_CURRENT).all())


_CURRENT = select(Revision.part, Revision.revision)


SQLITE_WAIT_S = 30
CONNECT_WAIT_S = 5
MOST_CONNECTIONS = 15
ANSWER_WAIT_MS = 10_000
READ_ONLY = "optigpu_read_only"
_MISSING_TABLE_OR_COLUMN = ("42P01", "42703")
"""PostgreSQL's codes."""
_NO_TABLE_OR_COLUMN = ("no such table", "no such column")
"""The same in the words of SQLite."""
_SQLITE_ADVICE = {
    "unable to open": "Check that its folder is there, and that this user may write there.",
    "readonly": "Give this user the right to write the file and its folder.",
    "is full": "Free some space on its disk.",
    "locked": "Another process writes to it for long; try again.",
}
"""What to do, by words of SQLite's errors."""


class Database:
    """A pool of connections to one database: `sqlite:///FILE`, whose folder is made, or `postgresql+psycopg://...`.
    Raises StoreError for another kind of database, StoreUnavailableError from any use when it cannot be reached."""

    def __init__(self, url: str) -> None:
        self._engine = engine_for(url)
        self._write = sessionmaker(self._engine, expire_on_commit=False)
        reading = self._engine.execution_options(**{READ_ONLY: True})
        glancing: Engine = reading
        if self.dialect == "postgresql":
            # Each statement sees the state of the first one. A transaction that only reads is never repeated.
            reading = reading.execution_options(postgresql_readonly=True, isolation_level="REPEATABLE READ")
            glancing = engine_for(url, transactions=False)
        self._read = sessionmaker(reading, expire_on_commit=False)
        self._glancing = glancing

    @property
    def dialect(self) -> str:
        """ "sqlite" or "postgresql"."""
        return self._engine.dialect.name

    @property
    def folder(self) -> Path | None:
        """The folder of a SQLite file; None for a server."""
        file = self._engine.url.database
        return Path(file).parent if file and self.dialect == "sqlite" else None

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one state of the database and cannot change it."""
        with store_errors(self._engine.url), self._read() as session:
            yield session
            session.commit()  # at a rollback psycopg forgets the statements that it has prepared

    @contextmanager
    def glance(self) -> Iterator[Connection]:
        """A connection for single statements that read: on PostgreSQL each sees its own moment, which takes half as
        many messages."""
        with store_errors(self._engine.url), self._glancing.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction, rolled back when anything is raised; it renews the revisions of what it changed. On SQLite
        it holds the write lock from its start, so that nothing it has read can change under it."""
        with store_errors(self._engine.url), self._write.begin() as session:
            yield session
            renew_revisions(session)

    def ping(self) -> None:
        """Raises StoreUnavailableError when the database does not answer."""
        with self.read() as session:
            session.execute(select(1))

    def close(self) -> None:
        """Closes the pooled connections."""
        self._engine.dispose()
        self._glancing.dispose()


def default_url(data_dir: Path) -> str:
    """The SQLite file of the embedded service."""
    return URL.create("sqlite", database=str(data_dir / "optigpu.db")).render_as_string(hide_password=False)


def engine_for(url: str, *, foreign_keys: bool = True, transactions: bool = True) -> Engine:
    """An engine with settings that make the two databases behave alike. Without `foreign_keys` SQLite does not enforce
    them: a migration rebuilds tables that others refer to. Without `transactions` PostgreSQL commits each statement."""
    address = address_of(url)
    if address.get_backend_name() == "postgresql":
        # A host that vanished sends no refusal: without a limit of its own a write would hang for many minutes.
        waits = {"connect_timeout": CONNECT_WAIT_S, "tcp_user_timeout": ANSWER_WAIT_MS}
        # None beyond the pool: it would be closed after each use, and opening one takes longer than a query.
        # The last one used is used next: its server process has the statements prepared and its caches warm.
        pool: dict[str, Any] = {"pool_size": MOST_CONNECTIONS, "max_overflow": 0, "pool_use_lifo": True}
        if not transactions:
            pool |= {"isolation_level": "AUTOCOMMIT", "skip_autocommit_rollback": True}
            pool |= {"pool_reset_on_return": None}
        engine = create_engine(address, connect_args=waits, **pool)
        event.listen(engine, "checkout", _require_open)
        return engine
    if not address.database or address.database == ":memory:":
        raise StoreError("The database must be a file that every process can open; use sqlite:///PATH.")
    folder = Path(address.database).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"The folder of the database, {folder}, cannot be made ({error.strerror}); name another with "
            "OPTIGPU_DATA_DIR or OPTIGPU_DATABASE_URL."
        ) from error
    engine = create_engine(address, connect_args={"timeout": SQLITE_WAIT_S})
    _prepare_sqlite(engine, foreign_keys)
    return engine


class _HasSocket(Protocol):
    def fileno(self) -> int: ...


def _require_open(connection: _HasSocket, _record: object, _proxy: object) -> None:
    """Replaces a pooled connection that its server has closed; until then an idle connection has nothing to read."""
    waiting = select_.poll()
    waiting.register(connection.fileno(), select_.POLLIN)
    if waiting.poll(0):
        raise DisconnectionError("The server has closed this connection.")


def moment(session: Session, now: datetime | None = None) -> datetime:
    """The database server's clock, or `now` if given: workers' clocks may differ, but leases must use one clock."""
    if now is not None:
        return now
    if session.get_bind().dialect.name == "postgresql":
        clock: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
        return clock
    return utc_now()


@contextmanager
def store_errors(url: URL) -> Iterator[None]:
    """Converts SQLAlchemy's errors: a database that is down, locked or outdated is StoreUnavailableError. An
    OptiGPUError of a column type is raised unchanged."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        raise _unavailable(url, error) from error
    except StatementError as error:
        if isinstance(error.orig, OptiGPUError):
            raise error.orig from error
        is_outdated = getattr(error.orig, "sqlstate", None) in _MISSING_TABLE_OR_COLUMN
        if is_outdated or type(error) is DatabaseError:  # the file is none of SQLite's
            raise _unavailable(url, error) from error
        raise


def _unavailable(url: URL, error: SQLAlchemyError) -> StoreUnavailableError:
    cause = str(error.orig if isinstance(error, DBAPIError) else error).strip().splitlines()[0].rstrip(".")
    if isinstance(error, ProgrammingError) or cause.startswith(_NO_TABLE_OR_COLUMN):
        advice = "Run `alembic upgrade head` on it."
    elif url.get_backend_name() == "postgresql":
        advice = "Check that it runs, and its address in OPTIGPU_DATABASE_URL."
    else:
        known = (advice for words, advice in _SQLITE_ADVICE.items() if words in cause)
        advice = next(known, "Check that it is a file of SQLite.")
    return StoreUnavailableError(f"The database {url.render_as_string()} cannot be used: {cause}. {advice}")


def address_of(url: str) -> URL:
    """The parts of a database's URL. Raises StoreError for what is none, and for another kind of database."""
    try:
        address = make_url(url)
    except ArgumentError:
        why = "The database URL cannot be read; use sqlite:///PATH or postgresql+psycopg://..."
        raise StoreError(why) from None
    backend = "postgresql" if address.drivername == "postgres" else address.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise StoreError(f"{backend} is not supported; use sqlite:///PATH or postgresql+psycopg://...")
    return address.set(drivername="postgresql+psycopg" if backend == "postgresql" else "sqlite")


def _prepare_sqlite(engine: Engine, foreign_keys: bool) -> None:
    """The driver must not begin transactions by itself: it would begin them late, and without the write lock."""

    @event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(READ_ONLY, False)
        connection.exec_driver_sql(f"PRAGMA query_only = {'ON' if read_only else 'OFF'}")
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


URL_VARIABLE = "OPTIGPU_DATABASE_URL"


def local_database() -> Database | None:
    """The database that a service started here would use; None where its file was never made. Raises StoreError."""
    url = os.environ.get(URL_VARIABLE) or default_url(data_dir())
    address = address_of(url)
    if address.get_backend_name() == "sqlite" and not Path(address.database or "").is_file():
        return None
    try:
        return Database(url)
    except ModuleNotFoundError as error:
        why = f"{error.name} is missing; install it with: pip install 'optigpu[service]'."
        raise StoreError(why) from error
