"""The models that edge devices report on."""

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from api.auth import Reader, Submitter
from api.inputs import job_body, strict_document
from api.openapi import GUARDED, MANIFESTS, posted, problems
from api.service import ServiceDep
from optigpu.documents.administration import AuditAction
from optigpu.documents.devices import EdgeModelView
from optigpu.documents.manifest import ModelManifest
from optigpu.store import audit, edge_reports
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1/edge", tags=["devices"], responses=GUARDED)


class EdgeModels(Frozen):
    """Every model that the service knows, newest first."""

    models: tuple[EdgeModelView, ...]


@router.post(
    "/models",
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


@router.get("/models", operation_id="list_edge_models", summary="List models for devices")
def list_edge_models(service: ServiceDep, _: Reader) -> EdgeModels:
    """Each model's manifest, the newest first."""
    with service.database.read() as session:
        return EdgeModels(models=tuple(edge_reports.list_models(session)))
