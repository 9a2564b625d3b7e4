"""Outcomes of `optigpu gate`, kept by series. What is worse is sent to the webhooks that ask for `gate.worse`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from api.auth import Reader, Submitter
from api.inputs import Cursor, Limit, job_body, strict_document
from api.openapi import GATES, GUARDED, posted, problems
from api.service import ServiceDep
from optigpu.documents.administration import AuditAction
from optigpu.documents.gates import GatePage, GateRequest, GateView, Series
from optigpu.store import audit, gates
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1/gates", tags=["jobs"], responses=GUARDED)


class GateFilter(Frozen):
    """Which gates to list."""

    series: Series | None = None
    limit: Limit = 50
    cursor: Cursor | None = None


@router.post(
    "",
    status_code=201,
    operation_id="add_gate",
    summary="Keep the outcome of a gate",
    responses=problems(408, 413, 415),
    openapi_extra=posted(GateRequest, GATES),
)
def add_gate(body: Annotated[bytes, Depends(job_body)], service: ServiceDep, who: Submitter) -> GateView:
    """Keeps what `optigpu gate` found in a series, and tells the webhooks that ask for `gate.worse` of a loss that is
    rare enough beside the newest gates of all other series."""
    asked = strict_document(body, GateRequest)
    with service.database.write() as session:
        kept = gates.add(session, asked, who.name)
        audit.write(session, who.actor, AuditAction.GATE_ADDED, kept.id, {"series": kept.series})
    return kept


@router.get("", operation_id="list_gates", summary="List gates, the newest first")
def list_gates(service: ServiceDep, _: Reader, wanted: Annotated[GateFilter, Query()]) -> GatePage:
    """Outcomes of gates, of one series or of all."""
    with service.database.read() as session:
        return gates.list_(session, series=wanted.series, limit=wanted.limit, cursor=wanted.cursor)
