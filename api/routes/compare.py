"""Comparison of two results."""

from typing import Annotated

from fastapi import APIRouter, Query

from api.auth import Reader
from api.inputs import Uuid
from api.openapi import GUARDED, problems
from api.problems import ProblemError
from api.service import ServiceDep
from optigpu.documents.views import Comparison
from optigpu.store import results
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1", tags=["results"], responses=GUARDED)


class ComparisonQuery(Frozen):
    """The two results to compare."""

    baseline: Annotated[Uuid, Query(description="The id of the result that ratios are relative to.")]
    candidate: Annotated[Uuid, Query(description="The id of the other one.")]
    anyway: Annotated[
        bool, Query(description="Compare different workloads or hardware too; notes then say what differs.")
    ] = False


@router.get(
    "/compare",
    operation_id="compare_results",
    summary="Compare two results",
    responses=problems(404, 409, 410),
)
def compare_results(
    service: ServiceDep, _: Reader, wanted: Annotated[ComparisonQuery, Query()]
) -> Comparison:
    """The ratio of each metric, its 95% interval, and whether the difference is real; from stored summaries."""
    from optigpu.statistics.compare import NotComparableError, compare  # here, because it loads numpy

    with service.database.read() as session:
        baseline, candidate = (results.get(session, each) for each in (wanted.baseline, wanted.candidate))
    try:
        return compare(baseline, candidate, anyway=wanted.anyway)
    except NotComparableError as error:
        raise ProblemError(409, str(error)) from None
