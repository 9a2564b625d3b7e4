"""Statements that differ between the databases: INSERT with a conflict clause, and locks by name."""

import hashlib
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

Insert = postgresql.Insert | sqlite.Insert


def insert_into(session: Session, table: type[Any]) -> Insert:
    """An INSERT that offers `on_conflict_do_nothing` and `on_conflict_do_update`, for the session's database."""
    dialect = session.get_bind().dialect.name
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def take_turns(session: Session, name: str) -> None:
    """Transactions that call this with the same name follow each other: each sees what the one before has committed.

    On SQLite all transactions that write do so anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        session.execute(select(func.pg_advisory_xact_lock(number)))
