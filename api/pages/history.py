"""The page at `/history`: one variant on one class of hardware over time, and what changed with its level."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.charts import figure
from api.inputs import Cursor, Uuid
from api.pages.view import Asked, ReaderView
from api.routes.leaderboard import MetricName
from optigpu.documents.queries import LeaderboardQuery
from optigpu.store import leaderboard, results

router = APIRouter()
ROWS = 40


class HistoryAsked(Asked):
    """Whose history, by any result of it."""

    result: Annotated[Uuid | None, Query(description="The id of a result.")] = None
    metric: MetricName | None = None
    cursor: Cursor | None = None


@router.get("/history")
def read_history(view: ReaderView, asked: Annotated[HistoryAsked, Query()]) -> Response:
    """Without a result, the variants that were measured more than once."""
    if asked.result is None:
        return _choice(view)
    from optigpu.statistics.levels import with_changes  # here, because it loads numpy

    metric = asked.metric.value if asked.metric else None
    with view.service.database.read() as session:
        found = results.history_of(session, asked.result, metric=metric, cursor=asked.cursor)
    known, root = with_changes(found), view.look.root
    return view.page(
        "history.html",
        history=known,
        chart=figure(known, id_prefix="history", link=lambda source: f"{root}/results/{source}"),
        worse=[change for change in known.changes if not change.improved],
        asked=asked,
        metrics=list(MetricName),
    )


def _choice(view: ReaderView) -> Response:
    with view.service.database.read() as session:
        boards = leaderboard.query(session, LeaderboardQuery(limit=ROWS)).boards
    rows = [(board, row) for board in boards for row in board.rows if row.earlier]
    return view.page("histories.html", rows=rows)
