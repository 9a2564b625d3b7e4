"""Alert rules: create, list and delete them. What fires is sent to the webhooks that ask for `alert.fired`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from api.auth import Administrator
from api.inputs import Id, admin_body, strict_document
from api.openapi import ALERTS, GUARDED, posted, problems
from api.service import ServiceDep
from optigpu.documents.administration import AlertRequest, AlertView, AuditAction
from optigpu.store import alerts, audit
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1/alerts", tags=["administration"], responses=GUARDED)


class Alerts(Frozen):
    """Every alert rule, the oldest first."""

    alerts: tuple[AlertView, ...]


@router.post(
    "",
    status_code=201,
    operation_id="create_alert",
    summary="Create an alert rule",
    responses=problems(404, 408, 409, 410, 413, 415),
    openapi_extra=posted(AlertRequest, ALERTS),
)
def create_alert(
    body: Annotated[bytes, Depends(admin_body)], service: ServiceDep, who: Administrator
) -> AlertView:
    """Watches the place of a result from now on, and tells the webhooks that ask for `alert.fired`."""
    asked = strict_document(body, AlertRequest)
    with service.database.write() as session:
        made = alerts.create(session, asked, who.name)
        details = {"result_id": made.result_id, "kind": made.kind.value, "metric": made.metric}
        audit.write(session, who.actor, AuditAction.ALERT_CREATED, made.id, details)
    return made


@router.get("", operation_id="list_alerts", summary="List alert rules")
def list_alerts(service: ServiceDep, _: Administrator) -> Alerts:
    """Every rule, with when it last fired."""
    with service.database.read() as session:
        return Alerts(alerts=tuple(alerts.list_(session)))


@router.delete(
    "/{id}",
    status_code=204,
    operation_id="delete_alert",
    summary="Delete an alert rule",
    response_class=Response,
    responses=problems(404),
)
def delete_alert(rule_id: Id, service: ServiceDep, who: Administrator) -> None:
    """It fires no more."""
    with service.database.write() as session:
        removed = alerts.remove(session, rule_id)
        audit.write(session, who.actor, AuditAction.ALERT_DELETED, rule_id, {"label": removed.label})
