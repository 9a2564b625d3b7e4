"""The outcomes of gates, by series. A gate that found something worse is told to the webhooks that ask for `gate.worse`
if its loss is rare enough beside the newest gates of all other series: a false discovery rate of 5%, as for alerts."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from optigpu.documents.administration import WebhookEvent
from optigpu.documents.gates import GatePage, GateRequest, GateVerdict, GateView
from optigpu.store import webhooks
from optigpu.store.database import moment
from optigpu.store.statements import newest_first
from optigpu.store.tables import GateRow
from optigpu.vocabulary import new_id


def add(session: Session, asked: GateRequest, created_by: str) -> GateView:
    """Keeps an outcome, and tells of it."""
    from optigpu.statistics.changes import discovered  # here, because it loads numpy

    outcome = asked.outcome
    newest = select(func.max(GateRow.id)).where(GateRow.series != asked.series).group_by(GateRow.series)
    others = session.scalars(select(GateRow.chance).where(GateRow.id.in_(newest))).all()
    row = GateRow(
        id=new_id(),
        series=asked.series,
        at=moment(session),
        created_by=created_by,
        chance=outcome.chance,
        told=outcome.verdict is GateVerdict.WORSE and discovered(outcome.chance, others),
        outcome=outcome.model_dump(mode="json"),
    )
    session.add(row)
    session.flush()
    if row.told:
        figures = outcome.model_dump(mode="json", exclude={"base_figures", "head_figures"})
        webhooks.record(
            session, WebhookEvent.GATE_WORSE, {"gate_id": row.id, "series": row.series} | figures, row.at
        )
    return row.as_view(GateView)


def list_(
    session: Session, *, series: str | None = None, limit: int = 50, cursor: str | None = None
) -> GatePage:
    """A page of gates, newest first; of one series if it is given. Raises CursorError."""
    query = select(GateRow) if series is None else select(GateRow).where(GateRow.series == series)
    rows, following = newest_first(session, query, GateRow.id, limit, cursor)
    return GatePage(gates=tuple(row.as_view(GateView) for row in rows), next_cursor=following)
