"""INSERT statements with a conflict clause, for which SQLAlchemy has a function for each database."""

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

Insert = postgresql.Insert | sqlite.Insert


def insert_into(session: Session, table: type[Any]) -> Insert:
    """An INSERT that offers `on_conflict_do_nothing` and `on_conflict_do_update`, for the session's database."""
    dialect = session.get_bind().dialect.name
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
