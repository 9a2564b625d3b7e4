"""The audit log: who changed what, when and from where. An entry is written in the transaction of its change."""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.administration import AuditAction, AuditPage, AuditView
from optigpu.store.database import moment
from optigpu.store.statements import newest_first
from optigpu.store.tables import AuditRow
from optigpu.vocabulary import Document, Frozen, new_id


class Actor(Frozen):
    """Who makes a change: the name of a key, a device or a user, and what is known of the request."""

    name: str
    key_id: str | None = None
    address: str | None = None
    request_id: str | None = None


def write(
    session: Session,
    actor: Actor,
    action: AuditAction,
    target: str,
    details: Document | None = None,
    at: datetime | None = None,
) -> None:
    """Adds an entry, of now unless the change has a moment of its own. `details` must hold no secret."""
    session.add(
        AuditRow(
            id=new_id(),
            at=moment(session, at),
            action=action.value,
            target=target,
            details=dict(details or {}),
            **actor.model_dump(),
        )
    )


def list_(
    session: Session, *, target: str | None = None, limit: int = 50, cursor: str | None = None
) -> AuditPage:
    """A page of changes, newest first; of one target if it is given. Raises CursorError."""
    query = select(AuditRow) if target is None else select(AuditRow).where(AuditRow.target == target)
    rows, following = newest_first(session, query, AuditRow.id, limit, cursor)
    return AuditPage(changes=tuple(row.as_view(AuditView) for row in rows), next_cursor=following)
