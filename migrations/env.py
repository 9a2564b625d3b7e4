"""What alembic runs for each command: connects, takes the lock, migrates in one transaction."""

import os
from logging.config import fileConfig
from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy import JSON, Connection, Enum, text
from sqlalchemy.types import TypeDecorator

from optigpu.paths import data_dir
from optigpu.store.database import default_url, engine_for
from optigpu.store.tables import Base
from optigpu.vocabulary import StoreError

LOCK = 0x6F70746967707500  # "optigpu": any number that nobody else on the server locks


def migrate(connection: Connection) -> None:
    """Runs what was asked for. SQLite cannot alter most things, so alembic rebuilds its tables (batch mode)."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        render_item=render_item,
        compare_server_default=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        context.run_migrations()
        if connection.dialect.name == "sqlite":
            refuse_dangling_rows(connection)


def refuse_dangling_rows(connection: Connection) -> None:
    """Foreign keys are off while SQLite's tables are rebuilt, so they are checked at the end."""
    dangling = connection.execute(text("PRAGMA foreign_key_check")).first()
    if dangling is not None:
        raise RuntimeError(
            f"The migration left rows in {dangling[0]} that refer to missing rows in {dangling[2]}."
        )


def render_item(kind: str, item: Any, _context: AutogenContext) -> str | Literal[False]:
    """A migration names plain types: what our own mean may change later, what it did may not."""
    if kind != "type":
        return False
    if isinstance(item, Enum):
        return f"sa.String({item.length})"
    if isinstance(item, TypeDecorator):
        return "sa.JSON()" if isinstance(item.impl, JSON) else f"sa.{item.impl!r}"
    return False


def main() -> None:
    """The caller's connection when migrations are used as a library, else a new one."""
    given = context.config.attributes.get("connection")
    if given is not None:
        migrate(given)
        return
    if context.is_offline_mode():
        raise StoreError("Migrations need a database to look at; run alembic without --sql.")
    if context.config.config_file_name:
        fileConfig(context.config.config_file_name, disable_existing_loggers=False)
    engine = engine_for(os.environ.get("OPTIGPU_DATABASE_URL") or default_url(data_dir()), foreign_keys=False)
    with engine.connect() as connection:
        migrate(connection)
    engine.dispose()


main()
