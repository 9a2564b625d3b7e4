"""Webhooks: where events are sent, and what became of each."""

import base64
import secrets
from collections.abc import Iterable

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from optigpu.documents.administration import (
    DeliveryPage,
    DeliveryView,
    NewWebhookView,
    WebhookEvent,
    WebhookView,
)
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.store.database import moment
from optigpu.store.tables import Webhook, WebhookDelivery
from optigpu.vocabulary import ConflictError, NotFoundError, new_id

SECRET_PREFIX = "whsec_"
"""How secrets begin in the Standard Webhooks specification; the rest is base64."""
SECRET_BYTES = 32
MOST_WEBHOOKS = 100
"""Each event is written once for each of them, in the transaction that ends a job."""


def create(session: Session, url: str, events: Iterable[WebhookEvent], created_by: str) -> NewWebhookView:
    """Adds a webhook with a new secret. Raises ConflictError when there are MOST_WEBHOOKS."""
    if len(session.scalars(select(Webhook.id)).all()) >= MOST_WEBHOOKS:
        raise ConflictError(f"There are {MOST_WEBHOOKS} webhooks, the most that may be; delete one first.")
    row = Webhook(
        id=new_id(),
        url=url,
        secret=SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode(),
        events=[event.value for event in dict.fromkeys(events)],
        created_at=moment(session),
        created_by=created_by,
    )
    session.add(row)
    session.flush()
    return NewWebhookView(**_view(row).model_dump(), secret=row.secret)


def list_(session: Session) -> list[WebhookView]:
    """Every webhook, the oldest first."""
    return [_view(row) for row in session.scalars(select(Webhook).order_by(Webhook.id))]


def get(session: Session, webhook_id: str) -> WebhookView:
    """The webhook. Raises NotFoundError."""
    row = session.get(Webhook, webhook_id)
    if row is None:
        raise NotFoundError(f"There is no webhook {webhook_id}.")
    return _view(row)


def remove(session: Session, webhook_id: str) -> WebhookView:
    """Deletes the webhook with its deliveries, and returns what it was. Raises NotFoundError."""
    removed = get(session, webhook_id)
    session.execute(delete(Webhook).where(Webhook.id == webhook_id))
    return removed


def deliveries(
    session: Session, webhook_id: str, *, limit: int = 50, cursor: str | None = None
) -> DeliveryPage:
    """A page of a webhook's deliveries, newest first. Raises NotFoundError, CursorError."""
    get(session, webhook_id)
    query = select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id)
    if cursor is not None:
        query = query.where(WebhookDelivery.id < decode_cursor(cursor, str)[0])
    rows = session.scalars(query.order_by(WebhookDelivery.id.desc()).limit(limit + 1))
    found = [DeliveryView(**{name: getattr(row, name) for name in DeliveryView.model_fields}) for row in rows]
    following = encode_cursor(found[limit - 1].id) if len(found) > limit else None
    return DeliveryPage(deliveries=tuple(found[:limit]), next_cursor=following)


def _view(row: Webhook) -> WebhookView:
    return WebhookView(
        id=row.id,
        url=row.url,
        events=tuple(WebhookEvent(event) for event in row.events),
        created_at=row.created_at,
        created_by=row.created_by,
    )
