"""The baselines of boards: what each class of hardware does without any technique, by torch."""

from collections import defaultdict
from collections.abc import Sequence

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
    here = (entry.hardware_class, entry.device)
    found = of_boards(session, [entry.board], None).get(entry.board, ())
    return next((each for each in found if (each.hardware, each.device) == here), None)


def of_boards(session: Session, boards: Sequence[int], metric: str | None) -> dict[int, tuple[Baseline, ...]]:
    """The current results of the empty stack that have this metric, by board; without one each board's primary
    metric."""
    each = LeaderboardEntry
    query = (
        select(MetricRow.board, each.result_id, each.hardware_class, each.device, MetricRow.summary)
        .join(BoardRow, BoardRow.number == MetricRow.board)
        .join(each, each.result_id == MetricRow.result_id)
        .where(MetricRow.board.in_(boards), MetricRow.standing == Standing.CURRENT)
        .where(MetricRow.name == (BoardRow.primary_metric if metric is None else metric))
        .where(each.backend == BACKEND, ~exists().where(EntryTechnique.result_id == each.result_id))
    )
    found: dict[int, list[Baseline]] = defaultdict(list)
    for row in session.execute(query):
        value = MetricSummary.model_validate_json(row.summary)
        baseline = Baseline(
            result_id=row.result_id, hardware=row.hardware_class, device=row.device, value=value
        )
        found[row.board].append(baseline)
    return {board: tuple(baselines) for board, baselines in found.items()}
