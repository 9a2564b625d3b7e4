"""How one variant on one class of hardware did over time."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from api.auth import Reader
from api.inputs import Cursor, Id
from api.openapi import GUARDED, problems
from api.routes.leaderboard import MetricName
from api.service import ServiceDep
from optigpu.documents.views import History
from optigpu.store import results
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1", tags=["results"], responses=GUARDED | problems(404, 410))


class HistoryQuery(Frozen):
    """Which metric, and how many results."""

    metric: Annotated[
        MetricName | None, Query(description="Default: the primary metric of the result's workload.")
    ] = None
    limit: Annotated[
        Annotated[int, Field(ge=1, le=results.MOST_POINTS)],
        Query(description="The largest number of results."),
    ] = 200
    cursor: Cursor | None = None


@router.get("/results/{id}/history", operation_id="get_history", summary="The history of a result's variant")
def get_history(
    result_id: Id, service: ServiceDep, _: Reader, wanted: Annotated[HistoryQuery, Query()]
) -> History:
    """All valid results of the same variant on the same class of hardware, the newest page first, and where their level
    changed: by how much, and which versions changed with it."""
    from optigpu.statistics.levels import with_changes  # here, because it loads numpy

    metric = wanted.metric.value if wanted.metric else None
    with service.database.read() as session:
        found = results.history_of(
            session, result_id, metric=metric, limit=wanted.limit, cursor=wanted.cursor
        )
    return with_changes(found)
