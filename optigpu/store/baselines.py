"""The baselines of a board: what each class of hardware does without any technique, by torch."""

from collections.abc import Iterator

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from optigpu.documents.result import MetricSummary
from optigpu.documents.views import Baseline, Standing
from optigpu.store.tables import BoardRow, EntryTechnique, LeaderboardEntry, MetricRow

BACKEND = "torch"


def of_result(session: Session, result_id: str) -> Baseline | None:
    """The baseline of a result's board and hardware by its primary metric; None where none was measured."""
    entry = session.get(LeaderboardEntry, result_id)
    if entry is None:
        return None
    metric = session.get_one(BoardRow, entry.board).primary_metric
    here = (entry.hardware_class, entry.device)
    return next(
        (each for each in of_board(session, entry.board, metric) if (each.hardware, each.device) == here),
        None,
    )


def of_board(session: Session, board: int, metric: str) -> Iterator[Baseline]:
    """The current results of the empty stack that have this metric."""
    each = LeaderboardEntry
    query = (
        select(each.result_id, each.hardware_class, each.device, MetricRow.summary)
        .join(MetricRow, MetricRow.result_id == each.result_id)
        .where(MetricRow.board == board, MetricRow.name == metric, MetricRow.standing == Standing.CURRENT)
        .where(each.backend == BACKEND, ~exists().where(EntryTechnique.result_id == each.result_id))
    )
    for row in session.execute(query):
        value = MetricSummary.model_validate_json(row.summary)
        yield Baseline(result_id=row.result_id, hardware=row.hardware_class, device=row.device, value=value)
