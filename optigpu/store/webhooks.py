"""Webhooks: where events are sent, and what became of each. The outbox holds an event from the transaction that makes
it, and it is sent after the commit, at least once. A delivery keeps its id, and its body is the event in the form of
the Standard Webhooks specification: type, timestamp, data."""

import base64
import json
import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from optigpu.documents.administration import (
    DeliveryPage,
    DeliveryView,
    NewWebhookView,
    WebhookEvent,
    WebhookView,
)
from optigpu.store.database import moment, row_of
from optigpu.store.statements import newest_first
from optigpu.store.tables import Webhook, WebhookDelivery
from optigpu.vocabulary import ConflictError, Document, Frozen, new_id

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
    return row.as_view(NewWebhookView)


def list_(session: Session) -> list[WebhookView]:
    """Every webhook, the oldest first."""
    return [row.as_view(WebhookView) for row in session.scalars(select(Webhook).order_by(Webhook.id))]


def get(session: Session, webhook_id: str) -> WebhookView:
    """The webhook. Raises NotFoundError."""
    return row_of(session, Webhook, "webhook", webhook_id).as_view(WebhookView)


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
    rows, following = newest_first(session, query, WebhookDelivery.id, limit, cursor)
    return DeliveryPage(deliveries=tuple(row.as_view(DeliveryView) for row in rows), next_cursor=following)


SENDING_S = 60.0
"""For how long a delivery belongs to the process that took it; then another one may send it."""
PAUSES_S = (5.0, 60.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0)
"""How long to wait after each attempt that failed; after one more than these the delivery is given up."""
KEPT = timedelta(days=30)
"""How long deliveries that are over can be looked up."""


class Delivery(Frozen):
    """A delivery that this process sends now. `attempt` is counted from 1."""

    id: str
    url: str
    secret: str
    body: str
    attempt: int


def subscribers(session: Session, event: WebhookEvent) -> Sequence[str]:
    """The webhooks that ask for this event. None of them can be deleted before the transaction ends."""
    query = select(Webhook.id, Webhook.events).with_for_update(read=True, key_share=True)
    return [row.id for row in session.execute(query) if event.value in row.events]


def record(session: Session, event: WebhookEvent, data: Document, at: datetime) -> None:
    """Enters a delivery for each webhook that asks for this event."""
    webhooks = subscribers(session, event)
    body = json.dumps({"type": event.value, "timestamp": at.isoformat(), "data": data}) if webhooks else ""
    same = {"event": event.value, "body": body, "created_at": at, "attempts": 0, "next_at": at}
    session.add_all(WebhookDelivery(id=new_id(), webhook_id=each, **same) for each in webhooks)


def is_due(session: Session) -> bool:
    """Whether a delivery can be taken now. It only reads, so that it waits for no other transaction."""
    due = WebhookDelivery.next_at <= moment(session)
    return session.scalars(select(WebhookDelivery.id).where(due).limit(1)).first() is not None


def take(session: Session, limit: int, now: datetime | None = None) -> list[Delivery]:
    """At most `limit` deliveries that are due; until SENDING_S has passed no other process takes them."""
    at = moment(session, now)
    query = (
        select(WebhookDelivery, Webhook)
        .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
        .where(WebhookDelivery.next_at <= at)
        .order_by(WebhookDelivery.next_at, WebhookDelivery.id)
        .limit(limit)
        .with_for_update(skip_locked=True, of=WebhookDelivery)
    )
    taken = []
    for row, webhook in session.execute(query).all():
        row.attempts += 1
        row.next_at = at + timedelta(seconds=SENDING_S)
        taken.append(row.as_view(Delivery, url=webhook.url, secret=webhook.secret, attempt=row.attempts))
    return taken


def delivered(session: Session, delivery: Delivery, now: datetime | None = None) -> None:
    """The receiver has accepted it."""
    _settle(session, delivery, next_at=None, delivered_at=moment(session, now), last_error=None)


def failed(session: Session, delivery: Delivery, error: str, now: datetime | None = None) -> None:
    """It is sent again after a pause that grows with each attempt, or given up after the last one."""
    next_at = None
    if delivery.attempt <= len(PAUSES_S):
        next_at = moment(session, now) + timedelta(seconds=PAUSES_S[delivery.attempt - 1])
    _settle(session, delivery, next_at=next_at, delivered_at=None, last_error=error)


def forget(session: Session, now: datetime | None = None) -> None:
    """Removes deliveries that have been over for KEPT."""
    over = WebhookDelivery.next_at.is_(None), WebhookDelivery.created_at < moment(session, now) - KEPT
    session.execute(delete(WebhookDelivery).where(*over))


def _settle(
    session: Session,
    delivery: Delivery,
    *,
    next_at: datetime | None,
    delivered_at: datetime | None,
    last_error: str | None,
) -> None:
    """Changes nothing if another process has taken the delivery since."""
    mine = WebhookDelivery.id == delivery.id, WebhookDelivery.attempts == delivery.attempt
    session.execute(
        update(WebhookDelivery)
        .where(*mine)
        .values(next_at=next_at, delivered_at=delivered_at, last_error=last_error)
    )
