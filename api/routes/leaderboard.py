"""The leaderboard, as JSON, CSV or Markdown."""

from enum import StrEnum
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from api.auth import Reader
from api.openapi import GUARDED
from api.parameters import Cursor, Limit, Text
from api.service import ServiceDep
from optigpu.documents.views import LeaderboardPage
from optigpu.store import leaderboard
from optigpu.store.leaderboard import LeaderboardQuery
from optigpu.vocabulary import METRICS, Frozen

router = APIRouter(prefix="/v1", tags=["leaderboard"], responses=GUARDED)

MetricName = StrEnum("MetricName", {name: name for name in METRICS})  # type: ignore[misc]
DEFAULT_METRIC = MetricName("tokens_per_s")


class Form(StrEnum):
    """How the rows are written."""

    JSON = "json"
    CSV = "csv"
    MARKDOWN = "md"


MEDIA_TYPES = {
    "application/json": Form.JSON,
    "text/csv": Form.CSV,
    "text/markdown": Form.MARKDOWN,
}


class LeaderboardFilter(Frozen):
    """Which rows to list; see LeaderboardQuery for what each filter means."""

    metric: MetricName = DEFAULT_METRIC
    workload: Annotated[Text | None, Query(description="A kind of workload, or a workload's digest.")] = None
    model: Text | None = None
    hardware: Annotated[Text | None, Query(description="Part of a hardware class.")] = None
    technique: Annotated[Text | None, Query(description="A technique that must be in the stack.")] = None
    backend: Text | None = None
    min_top1: Annotated[
        Annotated[float, Field(ge=0, le=1)] | None,
        Query(description="Minimum `top1_agreement` with fp32; rows without that figure are left out."),
    ] = None
    max_kld: Annotated[
        Annotated[float, Field(ge=0)] | None,
        Query(description="Maximum `kld_mean`, in nats; rows without that figure are left out."),
    ] = None
    source: Text = "worker"
    limit: Limit = 50
    cursor: Cursor | None = None
    format: Annotated[Form | None, Query(description="Takes precedence over the header Accept.")] = None

    def query(self) -> LeaderboardQuery:
        """The same, as the store asks for it."""
        return LeaderboardQuery(**self.model_dump(exclude={"format", "metric"}), metric=self.metric.value)


PAGE: dict[str, object] = {
    "description": "The rows, best first. The header Link leads to the next page.",
    "content": {media_type: {"schema": {"type": "string"}} for media_type in ("text/csv", "text/markdown")},
}


@router.get(
    "/leaderboard",
    operation_id="get_leaderboard",
    summary="Read the leaderboard",
    response_model=LeaderboardPage,
    responses={200: PAGE},
)
def get_leaderboard(
    request: Request, service: ServiceDep, _: Reader, wanted: Annotated[LeaderboardFilter, Query()]
) -> Response:
    """The current result of each variant on each class of hardware; overlapping intervals share a rank.

    Rows without an interval come last and share one rank.
    """
    with service.database.read() as session:
        page = leaderboard.query(session, wanted.query())
    form = wanted.format or _accepted(request.headers.get("accept", ""))
    response = _written(page, form)
    response.headers["Vary"] = "Accept"
    if page.next_cursor:
        given = wanted.model_dump(mode="json", exclude_unset=True) | {"cursor": page.next_cursor}
        response.headers["Link"] = f'</v1/leaderboard?{urlencode(given)}>; rel="next"'
    return response


def _written(page: LeaderboardPage, form: Form) -> Response:
    from optigpu.report.formats import markdown
    from optigpu.report.leaderboard import leaderboard_csv, leaderboard_grid

    match form:
        case Form.CSV:
            return Response(leaderboard_csv(page), media_type="text/csv")
        case Form.MARKDOWN:
            return Response(markdown(leaderboard_grid(page)), media_type="text/markdown")
        case Form.JSON:
            return Response(page.model_dump_json(), media_type="application/json")


def _accepted(accept: str) -> Form:
    """The form that a header Accept likes best; JSON when it names none of ours."""
    best, chosen = 0.0, Form.JSON
    for part in accept.split(","):
        media_type, *options = (piece.strip() for piece in part.split(";"))
        weight = _weight(options)
        if media_type.lower() in MEDIA_TYPES and weight > best:
            best, chosen = weight, MEDIA_TYPES[media_type.lower()]
    return chosen


def _weight(options: list[str]) -> float:
    for option in options:
        if option.startswith("q="):
            try:
                return float(option[2:])
            except ValueError:
                return 0.0
    return 1.0
