"""The page at `/alerts`, for administrators: rules that call webhooks when a figure falls, or its level changes."""

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.inputs import Id, Uuid
from api.pages.posted import AdministratorPosted
from api.pages.view import AdministratorView, Asked, PageView
from api.problems import from_store
from optigpu.documents.administration import AlertKind, AlertRequest, AuditAction, WebhookEvent
from optigpu.documents.fields import FieldsError, line, refusing
from optigpu.documents.views import History
from optigpu.store import alerts, audit, results, webhooks
from optigpu.store.database import Session
from optigpu.vocabulary import METRICS, StoreError

router = APIRouter()


class AlertsAsked(Asked):
    """The result for whose place a rule is to be made."""

    result: Uuid | None = None


@router.get("/alerts")
def read_alerts(view: AdministratorView, asked: Annotated[AlertsAsked, Query()]) -> Response:
    """The rules that there are, and the form of a new one."""
    return _page(view, asked.result)


@router.post("/alerts")
def make_alert(posted: AdministratorPosted) -> Response:
    """What is wrong stands above the form, in the words of the API."""
    result_id = posted.text("result_id").lower()
    try:
        asked = _request(posted.text, result_id)
        with posted.service.database.write() as session:
            made = alerts.create(session, asked, posted.who.name)
            details = {"result_id": made.result_id, "kind": made.kind.value, "metric": made.metric}
            audit.write(session, posted.who.actor, AuditAction.ALERT_CREATED, made.id, details)
    except FieldsError as error:
        return _page(posted.view, result_id, 422, [line(entry) for entry in error.entries])
    except StoreError as error:
        problem = from_store(error)
        return _page(posted.view, result_id, problem.status, [problem.detail])
    return posted.view.sent_to("/alerts")


@router.post("/alerts/{id}/delete")
def delete_alert(rule_id: Id, posted: AdministratorPosted) -> Response:
    """The rule fires no more."""
    with posted.service.database.write() as session:
        removed = alerts.remove(session, rule_id)
        audit.write(session, posted.who.actor, AuditAction.ALERT_DELETED, rule_id, {"label": removed.label})
    return posted.view.sent_to("/alerts")


def _request(text: Callable[[str], str], result_id: str) -> AlertRequest:
    """The rule that the form asks for. Raises FieldsError."""
    given = {"result_id": result_id, "kind": text("kind"), "metric": text("metric") or None}
    threshold = text("threshold") if given["kind"] != AlertKind.CHANGE_POINT else ""
    with refusing(AlertRequest):
        return AlertRequest.model_validate(given | {"threshold": threshold or None})


def _page(view: PageView, result_id: str | None, status: int = 200, errors: Sequence[str] = ()) -> Response:
    with view.service.database.read() as session:
        listening = [hook for hook in webhooks.list_(session) if WebhookEvent.ALERT_FIRED in hook.events]
        known = alerts.list_(session)
        place, errors = _place(session, result_id, errors)
    return view.page(
        "alerts.html",
        status,
        alerts=known,
        webhooks=listening,
        place=place,
        result_id=result_id,
        errors=errors,
        metrics=list(METRICS),
        kinds=[kind.value for kind in AlertKind],
    )


def _place(
    session: Session, result_id: str | None, errors: Sequence[str]
) -> tuple[History | None, Sequence[str]]:
    """What a rule for this result would watch; where there is none, why."""
    if result_id is None:
        return None, errors
    try:
        return results.history_of(session, result_id, limit=1), errors
    except StoreError as error:
        return None, errors or [str(error)]
