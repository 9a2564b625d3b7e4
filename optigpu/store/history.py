"""The valid results of one place on the leaderboard over time."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from optigpu.documents.views import History, HistoryPoint, RowFacts, Standing, Withdrawn
from optigpu.store.errors import row_of
from optigpu.store.statements import before, encode_cursor
from optigpu.store.tables import BoardRow, LeaderboardEntry, MetricRow
from optigpu.vocabulary import METRICS, NotFoundError

MOST = 1000


def of_result(
    session: Session,
    result_id: str,
    *,
    metric: str | None = None,
    limit: int = MOST,
    cursor: str | None = None,
) -> History:
    """The newest results of this one's place, without changes of their level, by its workload's primary metric if none
    is given. Raises NotFoundError, for an unknown metric too, and CursorError."""
    entry = row_of(session, LeaderboardEntry, Withdrawn.RESULT, result_id)
    name = metric or session.get_one(BoardRow, entry.board).primary_metric
    if name not in METRICS:
        raise NotFoundError(f"There is no metric {name!r}; the metrics are {', '.join(METRICS)}.")
    found = _found(session, entry, name, limit + 1, cursor)
    points = tuple(_point(row) for row in reversed(found[:limit]))
    facts = RowFacts.model_validate(entry.shown)
    oldest = points[0] if len(found) > limit else None
    return History(
        **facts.model_dump(include={"workload", "model", "label", "backend", "device", "hardware"}),
        metric=name,
        unit=METRICS[name].unit,
        better=METRICS[name].better,
        points=points,
        next_cursor=encode_cursor(oldest.measured_at.isoformat(), oldest.result_id) if oldest else None,
    )


def _found(
    session: Session, entry: LeaderboardEntry, metric: str, limit: int, cursor: str | None
) -> Sequence[Row[*tuple[Any, ...]]]:
    """The newest ones first."""
    each = LeaderboardEntry
    query = (
        select(
            *(each.result_id, each.measured_at, each.standing, each.replicates, each.warnings, each.shown),
            *(MetricRow.value, MetricRow.low, MetricRow.high),
        )
        .join(MetricRow, (MetricRow.result_id == each.result_id) & (MetricRow.name == metric))
        .where(
            each.board == entry.board,
            each.variant_digest == entry.variant_digest,
            each.hardware_class == entry.hardware_class,
            each.standing != Standing.INVALID,
        )
        .order_by(each.measured_at.desc(), each.result_id.desc())
        .limit(limit)
    )
    if cursor is not None:
        query = query.where(before(cursor, each.measured_at, each.result_id))
    found: Sequence[Row[*tuple[Any, ...]]] = session.execute(query).all()
    return found


def _point(row: Row[*tuple[Any, ...]]) -> HistoryPoint:
    return HistoryPoint(
        result_id=row.result_id,
        measured_at=row.measured_at,
        standing=row.standing,
        value=row.value,
        ci=None if row.low is None else (row.low, row.high),
        replicates=row.replicates,
        versions=RowFacts.model_validate(row.shown).versions,
        warnings=tuple(row.warnings.split()),
    )
