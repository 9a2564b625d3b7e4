"""The pages at `/login` and `/logout`, by which a key becomes a browser's sign-in for some hours, and those for
administrators: `/keys`, `/alerts` and `/webhooks`.

They show who has keys, until when, and when they were last used; the rules that call webhooks when a figure falls, or
its level changes; and where events are sent, which, and what became of the last ones. A key can be revoked, and rotated
by who shows it again: a browser that is signed in makes no key by itself.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from api.auth import address_of, needs_key, sign_in, sign_out, signed_in_by
from api.gate import Call, Caller
from api.inputs import Cursor, Id, Uuid
from api.pages.view import (
    AdministratorPosted,
    AdministratorView,
    Asked,
    PageView,
    Plain,
    Posted,
    View,
    form_of,
)
from api.problems import ProblemError, from_store, request_id
from api.routes.operations import create_webhook, delete_alert, delete_webhook
from api.service import Service
from optigpu.documents.administration import (
    AlertKind,
    AlertRequest,
    AuditAction,
    NewWebhookView,
    WebhookEvent,
)
from optigpu.documents.fields import FieldsError, line, refusing
from optigpu.documents.views import History
from optigpu.store import alerts, audit, keys, results, webhooks
from optigpu.store.database import Session
from optigpu.store.keys import KeyInfo
from optigpu.vocabulary import METRICS, StoreError, utc_now

router = APIRouter()
OWN_PATH = r"^/([^/\\\x00-\x20][^\\\x00-\x1f]*)?$"
"""A path of this service; one that begins with two slashes is another server."""
OwnPath = Annotated[str, Field(max_length=2000, pattern=OWN_PATH)]


class LoginAsked(Asked):
    """Where the reader wants to go on."""

    next: OwnPath = "/"


@router.get("/login")
def ask_for_key(view: View, asked: Annotated[LoginAsked, Query()]) -> Response:
    """The form; a service without keys says that it has none."""
    needed = needs_key(view.service.settings, view.service.database)
    return view.page("administration.html#login", next=asked.next, needed=needed, error=None)


@router.post("/login")
async def log_in(request: Request, view: View) -> Response:
    """The gate looks at the key as it does at any call's, so guesses are counted; then the page follows that was asked
    for."""
    values = await form_of(request, view.service)
    key = next(iter(values.get("key", ())), "").strip()
    next_ = next(iter(values.get("next", ())), "") or "/"
    if not re.fullmatch(OWN_PATH, next_):
        raise ProblemError(422, "next: The page to go on to is not one of this service.")
    try:
        who = await _who_has(request, view, key)
    except ProblemError as problem:
        return view.page("administration.html#login", 401, next=next_, needed=True, error=problem.detail)
    secret = await asyncio.to_thread(_begin, view.service, who)
    answer = view.sent_to(next_)
    sign_in(answer, request, view.service.settings, secret)
    return answer


@router.post("/logout")
async def log_out(request: Request, view: View) -> Response:
    """The sign-in ends here and in the database."""
    await form_of(request, view.service)
    if secret := signed_in_by(request):
        await asyncio.to_thread(_end, view.service, secret)
    answer = view.sent_to("/")
    sign_out(answer, view.service.settings)
    return answer


async def _who_has(request: Request, view: PageView, key: str) -> Caller:
    """Raises ProblemError for what is no key of this service."""
    if not key:
        raise ProblemError(401, "Enter a key.")
    admitted = await view.service.gate.admit(Call(key, address_of(request), request_id(request.scope)))
    if admitted.caller.key is None:
        raise ProblemError(401, "This service has no such key.")
    return admitted.caller


def _begin(service: Service, who: Caller) -> str:
    assert who.key is not None, "only a key signs in"
    with service.database.write() as session:
        audit.write(session, who.actor, AuditAction.SIGNED_IN, who.key.id)
        return keys.sign_in(session, who.key.id, timedelta(seconds=service.settings.session_s))


def _end(service: Service, secret: str) -> None:
    with service.database.write() as session:
        keys.sign_out(session, secret)


GRACES = {"1 hour": timedelta(hours=1), "1 day": timedelta(days=1), "7 days": timedelta(days=7)}
"""For how long a key that is rotated is still valid."""


@router.get("/keys")
def read_keys(view: AdministratorView, _: Plain) -> Response:
    """Every key that was not revoked."""
    return _keys_page(view)


@router.post("/keys/{id}/revoke")
def revoke_key(key_id: Id, posted: AdministratorPosted) -> Response:
    """The key is invalid at once, and every browser that was signed in with it is signed out."""
    with posted.service.database.write() as session:
        keys.revoke(session, key_id)
        audit.write(session, posted.who.actor, AuditAction.KEY_REVOKED, key_id)
    return posted.view.sent_to("/keys")


@router.post("/keys/{id}/rotate")
async def rotate_key(key_id: Id, posted: AdministratorPosted) -> Response:
    """Makes the key's successor and shows it once. The administrator's own key has to be entered again."""
    if not await _shows_own_key(posted):
        problem = "Enter the key that you are signed in with: without it nothing is rotated."
        return await asyncio.to_thread(_keys_page, posted.view, status=403, problem=problem)
    return await asyncio.to_thread(_rotated, posted, key_id)


def _rotated(posted: Posted, key_id: str) -> Response:
    grace = GRACES.get(posted.text("grace"), GRACES["1 day"])
    with posted.service.database.write() as session:
        plain = keys.rotate(session, key_id, grace=grace)
        successor = keys.verify(session, plain)
        assert successor is not None, "it was created in this transaction"
        details = {"name": successor.name, "scopes": list(successor.scopes)}
        audit.write(session, posted.who.actor, AuditAction.KEY_CREATED, successor.id, details)
        audit.write(session, posted.who.actor, AuditAction.KEY_ROTATED, key_id, {"successor": successor.id})
    return _keys_page(posted.view, made=plain, made_for=successor)


async def _shows_own_key(posted: Posted) -> bool:
    """Counted as a call with that key is, so that nobody guesses here either."""
    who, shown = posted.who, posted.text("key")
    if who.key is None or not shown:
        return False
    try:
        admitted = await posted.service.gate.admit(Call(shown, who.address, who.request_id))
    except ProblemError:
        return False
    return admitted.caller.key is not None and admitted.caller.key.id == who.key.id


def _keys_page(
    view: PageView,
    *,
    status: int = 200,
    made: str | None = None,
    made_for: KeyInfo | None = None,
    problem: str | None = None,
) -> Response:
    with view.service.database.read() as session:
        known: Sequence[KeyInfo] = keys.list_(session)
    own = view.who.key.id if view.who and view.who.key else None
    return view.page(
        "administration.html#keys",
        status,
        more_headers={"Cache-Control": "no-store"},
        keys=known,
        own=own,
        now=utc_now(),
        graces=list(GRACES),
        made=made,
        made_for=made_for,
        problem=problem,
    )


class AlertsAsked(Asked):
    """The result for whose place a rule is to be made."""

    result: Uuid | None = None


@router.get("/alerts")
def read_alerts(view: AdministratorView, asked: Annotated[AlertsAsked, Query()]) -> Response:
    """The rules that there are, and the form of a new one."""
    return _alerts_page(view, asked.result)


@router.post("/alerts")
def make_alert(posted: AdministratorPosted) -> Response:
    """What is wrong stands above the form, in the words of the API."""
    result_id = posted.text("result_id").lower()
    try:
        asked = _rule(posted.text, result_id)
        with posted.service.database.write() as session:
            made = alerts.create(session, asked, posted.who.name)
            details = {"result_id": made.result_id, "kind": made.kind.value, "metric": made.metric}
            audit.write(session, posted.who.actor, AuditAction.ALERT_CREATED, made.id, details)
    except FieldsError as error:
        return _alerts_page(posted.view, result_id, 422, [line(entry) for entry in error.entries])
    except StoreError as error:
        problem = from_store(error)
        return _alerts_page(posted.view, result_id, problem.status, [problem.detail])
    return posted.view.sent_to("/alerts")


@router.post("/alerts/{id}/delete")
def remove_alert(rule_id: Id, posted: AdministratorPosted) -> Response:
    """The rule fires no more."""
    delete_alert(rule_id, posted.service, posted.who)
    return posted.view.sent_to("/alerts")


def _rule(text: Callable[[str], str], result_id: str) -> AlertRequest:
    """The rule that the form asks for. Raises FieldsError."""
    given = {"result_id": result_id, "kind": text("kind"), "metric": text("metric") or None}
    threshold = text("threshold") if given["kind"] != AlertKind.CHANGE_POINT else ""
    with refusing(AlertRequest):
        return AlertRequest.model_validate(given | {"threshold": threshold or None})


def _alerts_page(
    view: PageView, result_id: str | None, status: int = 200, errors: Sequence[str] = ()
) -> Response:
    with view.service.database.read() as session:
        listening = [hook for hook in webhooks.list_(session) if WebhookEvent.ALERT_FIRED in hook.events]
        known = alerts.list_(session)
        place, errors = _watched(session, result_id, errors)
    return view.page(
        "administration.html#alerts",
        status,
        alerts=known,
        webhooks=listening,
        place=place,
        result_id=result_id,
        errors=errors,
        metrics=list(METRICS),
        kinds=[kind.value for kind in AlertKind],
    )


def _watched(
    session: Session, result_id: str | None, errors: Sequence[str]
) -> tuple[History | None, Sequence[str]]:
    """What a rule for this result would watch; where there is none, why."""
    if result_id is None:
        return None, errors
    try:
        return results.history_of(session, result_id, limit=1), errors
    except StoreError as error:
        return None, errors or [str(error)]


SHOWN_DELIVERIES = 25


class WebhooksAsked(Asked):
    """The webhook whose deliveries are shown, and which of them."""

    webhook: Uuid | None = None
    cursor: Cursor | None = None


@router.get("/webhooks")
def read_webhooks(view: AdministratorView, asked: Annotated[WebhooksAsked, Query()]) -> Response:
    """The webhooks that there are, and the form of a new one."""
    return _webhooks_page(view, asked)


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
    return _webhooks_page(posted.view, made=made)


@router.post("/webhooks/{id}/delete")
def remove_webhook(webhook_id: Id, posted: AdministratorPosted) -> Response:
    """Nothing more is sent to it."""
    delete_webhook(webhook_id, posted.service, posted.who)
    return posted.view.sent_to("/webhooks")


def _refused(view: PageView, given: Mapping[str, Sequence[str]], problem: ProblemError) -> Response:
    errors = [line(entry) for entry in problem.errors] or [problem.detail]
    return _webhooks_page(view, status=problem.status, errors=errors, given=given)


def _webhooks_page(
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
        sent = asked.webhook and webhooks.deliveries(
            session, asked.webhook, limit=SHOWN_DELIVERIES, cursor=asked.cursor
        )
    return view.page(
        "administration.html#webhooks",
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
