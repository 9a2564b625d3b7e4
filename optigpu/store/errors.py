"""Errors of the results database, besides those of the vocabulary."""

from typing import TypeVar

from sqlalchemy.orm import Session

from optigpu.store.tables import Tombstone
from optigpu.vocabulary import NotFoundError, StoreError

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
