"""The audit log."""

from typing import Annotated

from fastapi import APIRouter, Query

from api.auth import Administrator
from api.inputs import Cursor, Limit
from api.openapi import GUARDED
from api.service import ServiceDep
from optigpu.documents.administration import AuditPage
from optigpu.documents.queries import Text
from optigpu.store import audit
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1", tags=["administration"], responses=GUARDED)


class AuditFilter(Frozen):
    """Which changes to list."""

    target: Annotated[
        Text | None,
        Query(description="The id of what was changed: a job, a result, a key, a device, a webhook."),
    ] = None
    limit: Limit = 50
    cursor: Cursor | None = None


@router.get("/audit", operation_id="list_changes", summary="Who changed what, the newest first")
def list_changes(service: ServiceDep, _: Administrator, wanted: Annotated[AuditFilter, Query()]) -> AuditPage:
    """Each change of a job, result, key, device or webhook, with who made it, from which address, and when."""
    with service.database.read() as session:
        return audit.list_(session, target=wanted.target, limit=wanted.limit, cursor=wanted.cursor)
