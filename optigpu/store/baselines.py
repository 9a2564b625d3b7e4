"""The baselines of boards: what each class of hardware does without any technique, by torch."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from sqlalchemy.orm import Session

from optigpu.documents.result import MetricSummary
from optigpu.documents.views import Baseline
from optigpu.store import board_statements
from optigpu.store.board_statements import Values
from optigpu.store.tables import BoardRow, LeaderboardEntry

BACKEND = "torch"
Place = tuple[int, str]
"""A board, and a class of hardware on it."""


def of_result(session: Session, result_id: str) -> Baseline | None:
    """The baseline of a result's board and hardware by its primary metric; None where none was measured."""
    entry = session.get(LeaderboardEntry, result_id)
    board = entry and session.get(BoardRow, entry.board)
    if not entry or not board:
        return None
    found = of_places(session, {board.number: board.primary_metric}, {(board.number, entry.hardware_class)})
    here = found.get(board.number, ())
    return next((each for each in here if each.device == entry.device), None)


def of_places(
    session: Session, metrics: Mapping[int, str], places: Collection[Place]
) -> dict[int, tuple[Baseline, ...]]:
    """The current results of the empty stack at these places, by board; `metrics` has what each board is ranked by."""
    values: Values = {
        "boards": list(metrics),
        "metrics": sorted(set(metrics.values())),
        "hardware": sorted({hardware for _, hardware in places}),
        "backend": BACKEND,
    }
    found: dict[int, list[Baseline]] = defaultdict(list)
    for row in board_statements.run(session, board_statements.baselines(), values):
        board, metric, hardware, summary, result_id, device = row
        if metric == metrics[board] and (board, hardware) in places:
            value = MetricSummary.model_validate_json(summary)
            found[board].append(Baseline(result_id=result_id, hardware=hardware, device=device, value=value))
    return {board: tuple(baselines) for board, baselines in found.items()}
