"""Webhooks: create, list and delete them, and see what became of their deliveries."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from api.auth import Administrator
from api.deliveries import DestinationError, checked_url
from api.inputs import Cursor, Id, Limit, admin_body, strict_document
from api.openapi import GUARDED, WEBHOOKS, posted, problems
from api.problems import ProblemError
from api.service import ServiceDep
from optigpu.documents.administration import (
    AuditAction,
    DeliveryPage,
    NewWebhookView,
    WebhookRequest,
    WebhookView,
)
from optigpu.store import audit, webhooks
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1/webhooks", tags=["administration"], responses=GUARDED)


class Webhooks(Frozen):
    """Every webhook, the oldest first."""

    webhooks: tuple[WebhookView, ...]


class DeliveryFilter(Frozen):
    """Which page of a webhook's deliveries."""

    limit: Limit = 50
    cursor: Cursor | None = None


@router.post(
    "",
    status_code=201,
    operation_id="create_webhook",
    summary="Create a webhook",
    responses=problems(408, 409, 413, 415),
    openapi_extra=posted(WebhookRequest, WEBHOOKS),
)
def create_webhook(
    body: Annotated[bytes, Depends(admin_body)], service: ServiceDep, who: Administrator
) -> NewWebhookView:
    """Sends these events to an address from now on; the secret that signs them is shown once."""
    asked = strict_document(body, WebhookRequest)
    try:
        checked_url(asked.url, service.settings.webhook_allowed_hosts)
    except DestinationError as error:
        raise ProblemError(422, f"url: {error}", [{"field": "url", "message": str(error)}]) from None
    with service.database.write() as session:
        made = webhooks.create(session, asked.url, asked.events, who.name)
        details = {"url": made.url, "events": list(made.events)}
        audit.write(session, who.actor, AuditAction.WEBHOOK_CREATED, made.id, details)
    return made


@router.get("", operation_id="list_webhooks", summary="List webhooks")
def list_webhooks(service: ServiceDep, _: Administrator) -> Webhooks:
    """Every webhook without its secret."""
    with service.database.read() as session:
        return Webhooks(webhooks=tuple(webhooks.list_(session)))


@router.delete(
    "/{id}",
    status_code=204,
    operation_id="delete_webhook",
    summary="Delete a webhook",
    response_class=Response,
    responses=problems(404),
)
def delete_webhook(webhook_id: Id, service: ServiceDep, who: Administrator) -> None:
    """Nothing more is sent to it; its deliveries are deleted with it."""
    with service.database.write() as session:
        removed = webhooks.remove(session, webhook_id)
        audit.write(session, who.actor, AuditAction.WEBHOOK_DELETED, webhook_id, {"url": removed.url})


@router.get(
    "/{id}/deliveries",
    operation_id="list_deliveries",
    summary="The deliveries of a webhook, the newest first",
    responses=problems(404),
)
def list_deliveries(
    webhook_id: Id, service: ServiceDep, _: Administrator, wanted: Annotated[DeliveryFilter, Query()]
) -> DeliveryPage:
    """Each event with its attempts, when it is sent next, and why it was not accepted."""
    with service.database.read() as session:
        return webhooks.deliveries(session, webhook_id, limit=wanted.limit, cursor=wanted.cursor)
