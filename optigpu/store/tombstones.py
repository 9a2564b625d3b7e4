"""What stays of withdrawn results and jobs, and the errors for what is not there."""

from sqlalchemy.orm import Session

from optigpu.documents.views import Withdrawn
from optigpu.store.errors import WithdrawnError
from optigpu.store.tables import Tombstone
from optigpu.vocabulary import NotFoundError


def absent(session: Session, kind: Withdrawn, id_: str) -> NotFoundError:
    """The error for a result or a job that is not there: WithdrawnError with the reason if it was withdrawn."""
    stone = session.get(Tombstone, id_)
    if stone is None or stone.kind is not kind:
        return NotFoundError(f"There is no {kind} {id_}.")
    return WithdrawnError(f"The {kind} {id_} was withdrawn on {stone.withdrawn_at:%Y-%m-%d}: {stone.reason}")
