"""For who runs a service: liveness, readiness and Prometheus metrics; the audit log, webhooks and alert rules; the
workers and what they can run, and hardware with the catalog of published peaks."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

import structlog
from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import PlainTextResponse

from api.auth import Administrator, Reader
from api.deliveries import DestinationError, checked_url
from api.inputs import Cursor, Id, Limit, admin_body, strict_document
from api.openapi import ALERTS, GUARDED, WEBHOOKS, posted, problems
from api.problems import ProblemError
from api.service import Service, ServiceDep
from optigpu.documents.administration import (
    AlertRequest,
    AlertView,
    AuditAction,
    AuditPage,
    DeliveryPage,
    NewWebhookView,
    WebhookRequest,
    WebhookView,
)
from optigpu.documents.fields import Entry
from optigpu.documents.queries import Text
from optigpu.documents.views import WorkerView
from optigpu.hardware import catalog
from optigpu.paths import data_dir
from optigpu.store import alerts, audit, webhooks, workers
from optigpu.vocabulary import DeviceKind, Frozen, UnsupportedError

health = APIRouter(tags=["health"])
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
logger = structlog.stdlib.get_logger("api.operations")


class Alive(Frozen):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Readiness(Frozen):
    """The process can serve."""

    status: Literal["ready"] = "ready"


@health.get("/healthz", operation_id="is_alive", summary="Is the process alive?", responses=problems(422))
async def is_alive() -> Alive:
    """Answers while the process runs, whatever the state of the database and the broker."""
    return Alive()


@health.get("/readyz", operation_id="is_ready", summary="Can the service serve?", responses=problems(422))
def is_ready(service: ServiceDep) -> Readiness:
    """Checks the database, its tables, the broker, and the folder and the disk of the data."""
    failures = _failures(service)
    if failures:
        entries: list[Entry] = [{"field": part, "message": why} for part, why in failures.items()]
        raise ProblemError(503, f"Not ready: {', '.join(failures)}.", entries)
    return Readiness()


@health.get(
    "/metrics",
    operation_id="get_metrics",
    summary="Prometheus figures",
    response_class=PlainTextResponse,
    responses=GUARDED,
)
def get_metrics(service: ServiceDep, _: Reader) -> PlainTextResponse:
    """Request counts and times, jobs by state, the length of the queue, workers."""
    return PlainTextResponse(service.metrics.text(), media_type=EXPOSITION)


_SENTENCES = {
    "database": "The database does not answer.",
    "schema": "The database's tables cannot be looked at.",
    "broker": "The broker does not answer; jobs are stored, and start when a worker next looks at the queue.",
    "folder": "The data folder cannot be written.",
    "disk": "The disk of the data folder cannot be looked at.",
}
"""What is said of a part whose check raises an error: the error itself may name an address."""


def _failures(service: Service) -> Mapping[str, str]:
    """Why each part is not ready. What a part rests on comes first: of a database that does not answer nobody knows the
    tables, and of a folder that is not there nobody knows the disk."""
    found = {
        "database": _failure("database", service.database.ping),
        "broker": _failure("broker", service.doorbell.ping),
    }
    if not found["database"]:
        found["schema"] = _failure("schema", partial(_lacking_tables, service.settings.database_url))
    folder = service.database.folder
    if folder:
        found["folder"] = _failure("folder", partial(_write, folder))
    at = folder or _data_folder()
    if at and at.is_dir() and not found.get("folder"):
        found["disk"] = _failure("disk", partial(_lacking_space, at, service.settings.min_free_bytes))
    return {part: why for part in _SENTENCES if (why := found.get(part))}


def _data_folder() -> Path | None:
    """None where there is none: with a server for a database nothing need be kept here."""
    try:
        return data_dir()
    except UnsupportedError:
        return None


def _failure(part: str, check: Callable[[], str | None]) -> str | None:
    try:
        why = check()
    except Exception as error:
        logger.warning("not_ready", part=part, reason=str(error))
        return _SENTENCES[part]
    if why:
        logger.warning("not_ready", part=part, reason=why)
    return why


def _lacking_tables(url: str) -> str | None:
    import migrations

    return migrations.lacking(url)


def _write(folder: Path) -> None:
    """Writes a file that has no name and is gone at once."""
    with TemporaryFile(dir=folder):
        pass


def _lacking_space(folder: Path, least: int) -> str | None:
    free = shutil.disk_usage(folder).free
    if free >= least:
        return None
    return (
        f"The disk of the data folder has {free} bytes free, fewer than the {least} of OPTIGPU_MIN_FREE_BYTES; free "
        "some space."
    )


administration = APIRouter(prefix="/v1", tags=["administration"], responses=GUARDED)


class AuditFilter(Frozen):
    """Which changes to list."""

    target: Annotated[
        Text | None,
        Query(description="The id of what was changed: a job, a result, a key, a device, a webhook."),
    ] = None
    limit: Limit = 50
    cursor: Cursor | None = None


@administration.get("/audit", operation_id="list_changes", summary="Who changed what, the newest first")
def list_changes(service: ServiceDep, _: Administrator, wanted: Annotated[AuditFilter, Query()]) -> AuditPage:
    """Each change of a job, result, key, device or webhook, with who made it, from which address, and when."""
    with service.database.read() as session:
        return audit.list_(session, target=wanted.target, limit=wanted.limit, cursor=wanted.cursor)


class Webhooks(Frozen):
    """Every webhook, the oldest first."""

    webhooks: tuple[WebhookView, ...]


class DeliveryFilter(Frozen):
    """Which page of a webhook's deliveries."""

    limit: Limit = 50
    cursor: Cursor | None = None


@administration.post(
    "/webhooks",
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


@administration.get("/webhooks", operation_id="list_webhooks", summary="List webhooks")
def list_webhooks(service: ServiceDep, _: Administrator) -> Webhooks:
    """Every webhook without its secret."""
    with service.database.read() as session:
        return Webhooks(webhooks=tuple(webhooks.list_(session)))


@administration.delete(
    "/webhooks/{id}",
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


@administration.get(
    "/webhooks/{id}/deliveries",
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


class Alerts(Frozen):
    """Every alert rule, the oldest first."""

    alerts: tuple[AlertView, ...]


@administration.post(
    "/alerts",
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


@administration.get("/alerts", operation_id="list_alerts", summary="List alert rules")
def list_alerts(service: ServiceDep, _: Administrator) -> Alerts:
    """Every rule, with when it last fired."""
    with service.database.read() as session:
        return Alerts(alerts=tuple(alerts.list_(session)))


@administration.delete(
    "/alerts/{id}",
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


machines = APIRouter(prefix="/v1", tags=["workers"], responses=GUARDED)


class Workers(Frozen):
    """Every worker that has not left."""

    workers: tuple[WorkerView, ...]


@machines.get("/workers", operation_id="list_workers", summary="List workers")
def list_workers(service: ServiceDep, _: Reader) -> Workers:
    """What each worker can run, and whether it was heard of within its lease."""
    with service.database.read() as session:
        return Workers(workers=tuple(workers.list_(session, lease_s=service.settings.lease_s)))


class CatalogEntry(catalog.Device):
    """A device with its published peaks, and the ids of the living workers that have one."""

    served_by: tuple[str, ...] = ()


class Hardware(Frozen):
    """Classes of hardware, by which the leaderboard can be filtered, and every device of the catalog."""

    hardware: tuple[str, ...]
    catalog: tuple[CatalogEntry, ...]


@machines.get("/hardware", operation_id="list_hardware", summary="List hardware")
def list_hardware(service: ServiceDep, _: Reader) -> Hardware:
    """Hardware classes with a worker or a leaderboard row, and the catalog of peaks with the workers of each device."""
    with service.database.read() as session:
        classes = workers.hardware_classes(session)
        serving = workers.list_(session, lease_s=service.settings.lease_s)
    return Hardware(hardware=tuple(classes), catalog=catalog_of(worker for worker in serving if worker.alive))


def catalog_of(serving: Iterable[WorkerView]) -> tuple[CatalogEntry, ...]:
    """The catalog with those of these workers that have each device."""
    served: dict[str, list[str]] = {}
    for worker in serving:
        for name in dict.fromkeys(device.name for device in _devices(worker)):
            served.setdefault(name, []).append(worker.id)
    return tuple(
        CatalogEntry(**dict(device), served_by=tuple(served.get(device.name, ())))
        for device in catalog.devices()
    )


def _devices(worker: WorkerView) -> list[catalog.Device]:
    """The worker's devices that are in the catalog."""
    if worker.device is DeviceKind.CPU:
        found = [catalog.find_class(worker.hardware_class)]
    else:
        found = [catalog.find(name) for name in worker.gpus]
    return [device for device in found if device is not None]
