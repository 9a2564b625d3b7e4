"""Edge devices: they enrol, begin runs, send reports and change keys; people read what they sent, and add models for
them."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.convertors import StringConvertor, register_url_convertor

from api import device_identity, device_messages
from api.auth import Reader, Submitter, address_of
from api.device_identity import MOST_BODY_BYTES, Signed, entered
from api.device_messages import (
    ClaimAnswer,
    ClaimRequest,
    DeviceMessage,
    KeyAnswer,
    KeyRequest,
    MessageAnswer,
    RunAnswer,
    RunRequest,
    microseconds,
)
from api.inputs import Cursor, Id, Limit, job_body, json_body, strict_document
from api.openapi import CLAIMS, GUARDED, KEYS, MANIFESTS, MESSAGES, RUNS, posted, problems
from api.problems import request_id
from api.service import Service, ServiceDep
from optigpu.documents.administration import AuditAction
from optigpu.documents.devices import DevicePage, DeviceReportPage, DeviceView, EdgeModelView
from optigpu.documents.manifest import ModelManifest
from optigpu.store import audit, devices, edge_reports
from optigpu.store.audit import Actor
from optigpu.vocabulary import Frozen


class _DeviceId(StringConvertor):
    """Whatever is not the last part of /v1/devices/claim, which is a call of its own."""

    regex = "(?!claim$)[^/]+"


register_url_convertor("device", _DeviceId())
router = APIRouter(prefix="/v1", tags=["devices"], responses=GUARDED)
SENT = problems(408, 409, 413, 415)


class PageOf(Frozen):
    """Which page of a list."""

    limit: Limit = 50
    cursor: Cursor | None = None


async def claim_body(request: Request, service: ServiceDep) -> bytes:
    """The body of a claim, which counts for its address: a code could be guessed otherwise."""
    await service.limiter.count(f"claim:{address_of(request)}")
    return await json_body(request, MOST_BODY_BYTES)


@router.post(
    "/devices/claim",
    status_code=201,
    operation_id="claim_device",
    summary="Enrol a device",
    responses=problems(408, 413, 415)
    | {200: {"model": ClaimAnswer, "description": "The same claim was answered before."}},
    openapi_extra=posted(ClaimRequest, CLAIMS),
)
def claim_device(
    body: Annotated[bytes, Depends(claim_body)], request: Request, service: ServiceDep, response: Response
) -> ClaimAnswer:
    """A device proves that it has the code of an open invitation and hands over the key that it made, sealed with it.

    `python -m api devices invite` makes a code. A code is for one device; the same claim again gets the same answer,
    any other one 403.
    """
    asked = strict_document(body, ClaimRequest)
    with service.database.write() as session:
        claimed = device_identity.claim(session, asked)
        if claimed.created:
            actor = _device_actor(claimed.answer.device_id, request)
            details = {"invite": asked.invite}
            audit.write(session, actor, AuditAction.DEVICE_ENROLLED, claimed.answer.device_id, details)
    response.status_code = 201 if claimed.created else 200
    return claimed.answer


@router.post(
    "/devices/{id}/runs",
    status_code=201,
    operation_id="start_device_run",
    summary="Begin a run",
    responses=SENT,
    openapi_extra=posted(RunRequest, RUNS),
)
def start_device_run(signed: Signed, service: ServiceDep) -> RunAnswer:
    """The service notes when the run of a model began; its report names `run_id`. Signed by the device."""
    asked = strict_document(signed.body, RunRequest)
    with service.database.write() as session:
        entered(session, signed.request)
        run = edge_reports.start_run(session, signed.request, asked.model_sha256)
    return RunAnswer(run_id=run.id, server_time_us=microseconds(run.started_at))


@router.post(
    "/devices/{id}/measurements",
    operation_id="send_measurements",
    summary="Send reports",
    responses=SENT,
    openapi_extra=posted(DeviceMessage, MESSAGES),
)
def send_measurements(signed: Signed, service: ServiceDep) -> MessageAnswer:
    """How the device is, and up to 32 reports; none is a heartbeat. Signed by the device.

    Each report is stored once: the same one again gets its first answer. One that cannot be true is kept apart
    (quarantined) with the reasons. If one of them is malformed nothing of the message is stored, and `errors` name it.
    """
    message = strict_document(signed.body, DeviceMessage)
    with service.database.write() as session:
        device = entered(session, signed.request)
        return device_messages.take(session, signed.request, device, message)


@router.post(
    "/devices/{id}/key",
    operation_id="change_device_key",
    summary="Change a device's key",
    responses=SENT,
    openapi_extra=posted(KeyRequest, KEYS),
)
def change_device_key(signed: Signed, request: Request, service: ServiceDep) -> KeyAnswer:
    """The device hands over its next key, sealed with the one that signs this. Both are valid until the new one is
    used."""
    asked = strict_document(signed.body, KeyRequest)
    with service.database.write() as session:
        device = entered(session, signed.request)
        answer = device_identity.rotate(session, signed.request, asked, newest=device.newest)
        device_id = signed.request.device_id
        details = {"key_id": answer.key_id}
        actor = _device_actor(device_id, request)
        audit.write(session, actor, AuditAction.DEVICE_KEY_CHANGED, device_id, details)
    return answer


@router.get("/devices", operation_id="list_devices", summary="List devices, the newest first")
def list_devices(service: ServiceDep, _: Reader, page: Annotated[PageOf, Query()]) -> DevicePage:
    """Each device as it last described itself; those that were revoked stay in the list."""
    with service.database.read() as session:
        found = devices.list_(session, limit=page.limit, cursor=page.cursor)
    return found.model_copy(update={"devices": tuple(_linked(each, service) for each in found.devices)})


@router.get(
    "/devices/{id:device}", operation_id="get_device", summary="Get a device", responses=problems(404)
)
def get_device(device_id: Id, service: ServiceDep, _: Reader) -> DeviceView:
    """When it was last seen, its firmware, reset reason, signal, memory, and how many reports wait or were dropped."""
    with service.database.read() as session:
        return _linked(devices.get(session, device_id), service)


@router.get(
    "/devices/{id}/reports",
    operation_id="list_device_reports",
    summary="The reports of a device, the newest first",
    responses=problems(404),
)
def list_device_reports(
    device_id: Id, service: ServiceDep, _: Reader, page: Annotated[PageOf, Query()]
) -> DeviceReportPage:
    """Every stored report, quarantined ones among them, with its reasons and flags."""
    with service.database.read() as session:
        devices.get(session, device_id)
        return edge_reports.list_reports(session, device_id, limit=page.limit, cursor=page.cursor)


def _linked(device: DeviceView, service: Service) -> DeviceView:
    place = f"{service.settings.prefix}/v1/devices/{device.id}"
    return device.model_copy(update={"links": {"self": place, "reports": f"{place}/reports"}})


def _device_actor(device_id: str, request: Request) -> Actor:
    """A device as the audit log names it."""
    return Actor(
        name=f"device {device_id}", address=address_of(request), request_id=request_id(request.scope)
    )


class EdgeModels(Frozen):
    """Every model that the service knows, newest first."""

    models: tuple[EdgeModelView, ...]


@router.post(
    "/edge/models",
    status_code=201,
    operation_id="add_edge_model",
    summary="Add a model for devices",
    responses=problems(408, 409, 413, 415)
    | {200: {"model": EdgeModelView, "description": "The same manifest was added before."}},
    openapi_extra=posted(ModelManifest, MANIFESTS),
)
def add_edge_model(
    body: Annotated[bytes, Depends(job_body)], service: ServiceDep, who: Submitter, response: Response
) -> EdgeModelView:
    """Enters the manifest that `optigpu convert` wrote. Only reports about a known model can rank.

    A manifest is never changed: another one for the same file answers 409.
    """
    manifest = strict_document(body, ModelManifest)
    with service.database.write() as session:
        added = edge_reports.add_model(session, manifest)
        if added.created:
            audit.write(session, who.actor, AuditAction.EDGE_MODEL_ADDED, manifest.sha256)
    response.status_code = 201 if added.created else 200
    return added.model


@router.get("/edge/models", operation_id="list_edge_models", summary="List models for devices")
def list_edge_models(service: ServiceDep, _: Reader) -> EdgeModels:
    """Each model's manifest, the newest first."""
    with service.database.read() as session:
        return EdgeModels(models=tuple(edge_reports.list_models(session)))
