"""The audit log: who changed what, when and from where. An entry is written in the transaction of its change."""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.administration import AuditAction, AuditPage, AuditView
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.store.database import moment
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
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit + 1)
    if target is not None:
        query = query.where(AuditRow.target == target)
    if cursor is not None:
        query = query.where(AuditRow.id < decode_cursor(cursor, str)[0])
    found = [_view(row) for row in session.scalars(query)]
    following = encode_cursor(found[limit - 1].id) if len(found) > limit else None
    return AuditPage(changes=tuple(found[:limit]), next_cursor=following)


def _view(row: AuditRow) -> AuditView:
    return AuditView(**{name: getattr(row, name) for name in AuditView.model_fields})
