"""Errors of the results database, besides those of the vocabulary."""

from sqlalchemy.orm import Session

from optigpu.documents.views import Withdrawn
from optigpu.store.tables import Tombstone
from optigpu.vocabulary import NotFoundError, StoreError


class CursorError(StoreError):
    """The cursor of a page was not issued by this service."""


class WithdrawnError(NotFoundError):
    """The result or the job was withdrawn; the text says when and why."""


class KeyRefusedError(StoreError):
    """The key of a device was replaced or revoked."""


class StoreUnavailableError(StoreError):
    """The database cannot be reached, or its tables are not those of this version."""


def absent(session: Session, kind: Withdrawn, id_: str) -> NotFoundError:
    """The error for a result or a job that is not there: WithdrawnError with the reason if it was withdrawn."""
    stone = session.get(Tombstone, id_)
    if stone is None or stone.kind is not kind:
        return NotFoundError(f"There is no {kind} {id_}.")
    return WithdrawnError(f"The {kind} {id_} was withdrawn on {stone.withdrawn_at:%Y-%m-%d}: {stone.reason}")
