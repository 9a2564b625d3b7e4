"""The page at `/webhooks`, for administrators: where events are sent, which, and what became of the last ones."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.inputs import Cursor, Id, Uuid
from api.pages.posted import AdministratorPosted
from api.pages.view import AdministratorView, Asked, PageView
from api.problems import ProblemError, from_store
from api.routes.webhooks import create_webhook, delete_webhook
from optigpu.documents.administration import NewWebhookView, WebhookEvent
from optigpu.documents.fields import line
from optigpu.store import webhooks
from optigpu.vocabulary import StoreError

router = APIRouter()
SHOWN = 25


class WebhooksAsked(Asked):
    """The webhook whose deliveries are shown, and which of them."""

    webhook: Uuid | None = None
    cursor: Cursor | None = None


@router.get("/webhooks")
def read_webhooks(view: AdministratorView, asked: Annotated[WebhooksAsked, Query()]) -> Response:
    """The webhooks that there are, and the form of a new one."""
    return _page(view, asked)


@router.post("/webhooks")
def make_webhook(posted: AdministratorPosted) -> Response:
    """Shows the secret once. What is wrong stands above the form, in the words of the API."""
    given = {"url": posted.text("url"), "events": posted.values.get("events", [])}
    try:
        made = create_webhook(json.dumps(given).encode(), posted.service, posted.who)
    except ProblemError as problem:
        return _refused(posted.view, given, problem)
    except StoreError as error:
        return _refused(posted.view, given, from_store(error))
    return _page(posted.view, made=made)


@router.post("/webhooks/{id}/delete")
def delete(webhook_id: Id, posted: AdministratorPosted) -> Response:
    """Nothing more is sent to it."""
    delete_webhook(webhook_id, posted.service, posted.who)
    return posted.view.sent_to("/webhooks")


def _refused(view: PageView, given: Mapping[str, Sequence[str]], problem: ProblemError) -> Response:
    errors = [line(entry) for entry in problem.errors] or [problem.detail]
    return _page(view, status=problem.status, errors=errors, given=given)


def _page(
    view: PageView,
    asked: WebhooksAsked | None = None,
    *,
    status: int = 200,
    made: NewWebhookView | None = None,
    errors: Sequence[str] = (),
    given: Mapping[str, Sequence[str]] | None = None,
) -> Response:
    asked = asked or WebhooksAsked()
    with view.service.database.read() as session:
        known = webhooks.list_(session)
        sent = asked.webhook and webhooks.deliveries(session, asked.webhook, limit=SHOWN, cursor=asked.cursor)
    return view.page(
        "webhooks.html",
        status,
        more_headers={"Cache-Control": "no-store"},
        webhooks=known,
        shown=next((hook for hook in known if hook.id == asked.webhook), None),
        sent=sent,
        made=made,
        errors=errors,
        given=given or {"url": "", "events": []},
        events=[event.value for event in WebhookEvent],
    )
