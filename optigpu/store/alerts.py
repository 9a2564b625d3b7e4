"""Alert rules: questions to each new result of a place on the leaderboard, told to the webhooks that ask for them. They
are asked in the transaction that enters the result. A `threshold` fires when the current result is first beyond its
bound on the worse side, with its whole interval, and again only after one that was not. A `change_point` fires when the
level of the history changes after the result for which it fired last, and the change is rare enough beside those of all
other rules: at most 5% of what fires is a change of chance, however many rules there are (a false discovery rate)."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from optigpu.documents.administration import AlertKind, AlertRequest, AlertView, WebhookEvent
from optigpu.documents.result import Result
from optigpu.documents.views import Decision, RowFacts, Standing, Withdrawn
from optigpu.store import results, webhooks
from optigpu.store.database import moment, row_of
from optigpu.store.tables import AlertRule, BoardRow, LeaderboardEntry
from optigpu.vocabulary import METRICS, Better, ConflictError, Document, new_id

MOST_RULES = 1000
RESULTS = 200
"""How many of a place's newest results a change of its level is looked for in."""


def create(session: Session, asked: AlertRequest, created_by: str) -> AlertView:
    """Adds a rule for a result's place. What happened before does not fire it. Raises NotFoundError, ConflictError."""
    entry = row_of(session, LeaderboardEntry, Withdrawn.RESULT, asked.result_id)
    if session.execute(select(func.count()).select_from(AlertRule)).scalar_one() >= MOST_RULES:
        raise ConflictError(f"There are {MOST_RULES} alert rules, the most that may be; delete one first.")
    row = AlertRule(
        id=new_id(),
        board=entry.board,
        variant_digest=entry.variant_digest,
        hardware_class=entry.hardware_class,
        result_id=entry.result_id,
        label=RowFacts.model_validate(entry.shown).label,
        metric=asked.metric or session.get_one(BoardRow, entry.board).primary_metric,
        kind=asked.kind.value,
        threshold=asked.threshold,
        created_at=moment(session),
        created_by=created_by,
    )
    if asked.kind is AlertKind.CHANGE_POINT:
        points = results.history_of(session, entry.result_id, limit=1).points
        row.fired_for = points[-1].result_id if points else entry.result_id
    session.add(row)
    session.flush()
    return row.as_view(AlertView)


def list_(session: Session) -> list[AlertView]:
    """Every rule, the oldest first."""
    return [row.as_view(AlertView) for row in session.scalars(select(AlertRule).order_by(AlertRule.id))]


def remove(session: Session, rule_id: str) -> AlertView:
    """Deletes the rule and returns what it was. Raises NotFoundError."""
    row = row_of(session, AlertRule, "alert rule", rule_id)
    session.delete(row)
    return row.as_view(AlertView)


def look(session: Session, entry: LeaderboardEntry, result: Result) -> None:
    """Asks the rules of the place of a valid result that was just entered there."""
    here = (
        AlertRule.board == entry.board,
        AlertRule.variant_digest == entry.variant_digest,
        AlertRule.hardware_class == entry.hardware_class,
    )
    for rule in session.scalars(select(AlertRule).where(*here).order_by(AlertRule.id).with_for_update()):
        if rule.kind == AlertKind.CHANGE_POINT:
            _look_for_change(session, rule, result)
        elif entry.standing is Standing.CURRENT:
            _look_at_bound(session, rule, result)


def _look_at_bound(session: Session, rule: AlertRule, result: Result) -> None:
    figure = result.metrics.get(rule.metric)
    if figure is None or figure.value is None or rule.threshold is None:
        return
    low, high = figure.ci or (figure.value, figure.value)
    higher = METRICS[rule.metric].better is Better.HIGHER
    beyond = high < rule.threshold if higher else low > rule.threshold
    if beyond and rule.fired_for is None:
        _fire(session, rule, result, {})
    if not beyond:
        rule.fired_for = None


def _look_for_change(session: Session, rule: AlertRule, result: Result) -> None:
    from optigpu.statistics.changes import discovered, with_changes  # here, because it loads numpy

    of_others = (AlertRule.kind == AlertKind.CHANGE_POINT, AlertRule.id != rule.id)
    others = session.scalars(select(AlertRule.chance).where(*of_others)).all()
    history = results.history_of(session, result.id, metric=rule.metric, limit=RESULTS)
    found = with_changes(history, series=len(others) + 1)
    order = [point.result_id for point in found.points]
    told = order.index(rule.fired_for) if rule.fired_for in order else -1
    new = [change for change in found.changes if order.index(change.result_id) > told]
    rule.chance = new[-1].chance if new else None
    if new and discovered(new[-1].chance, (1.0 if each is None else each for each in others)):
        _fire(session, rule, result, {"change": new[-1].model_dump(mode="json")})


def _fire(session: Session, rule: AlertRule, result: Result, more: Document) -> None:
    rule.fired_at, rule.fired_for = moment(session), result.id
    figure = result.metrics.get(rule.metric)
    data = {
        "rule_id": rule.id,
        "kind": rule.kind,
        "metric": rule.metric,
        "threshold": rule.threshold,
        "result_id": result.id,
        "job_id": result.job_id,
        "label": rule.label,
        "workload": result.variant.workload,
        "model": result.variant.model,
        "hardware_class": rule.hardware_class,
        "value": figure.value if figure else None,
        "ci": list(figure.ci) if figure and figure.ci else None,
    }
    webhooks.record(session, WebhookEvent.ALERT_FIRED, data | dict(more), rule.fired_at)


def look_for_regression(
    session: Session, before: str | None, entry: LeaderboardEntry, result: Result
) -> None:
    """Tells the webhooks if the result of `entry` took the place of the result `before`, its primary metric is
    statistically worse, and that is rare enough beside what the current results of all other places came with. Nothing
    is compared where no webhook asks for the event."""
    if before is None or not webhooks.subscribers(session, WebhookEvent.REGRESSION_FOUND):
        return
    from optigpu.statistics.changes import discovered
    from optigpu.statistics.compare import NotComparableError, compare  # here, because they load numpy

    variant = result.variant
    try:
        comparison = compare(results.get(session, before), results.get(session, result.id))
    except NotComparableError:
        return
    metric = comparison.metrics.get(variant.primary_metric)
    is_worse = metric is not None and metric.decision is Decision.WORSE
    entry.chance = metric.chance or 0.0 if metric and is_worse else 1.0
    table = LeaderboardEntry
    current = (
        table.standing == Standing.CURRENT,
        table.chance.is_not(None),
        table.result_id != entry.result_id,
    )
    others = session.scalars(select(table.chance).where(*current)).all()
    if metric is None or not is_worse or not discovered(entry.chance, (each or 0.0 for each in others)):
        return
    data = {
        "result_id": result.id,
        "previous_result_id": before,
        "job_id": result.job_id,
        "label": comparison.candidate.label,
        "workload": variant.workload,
        "model": variant.model,
        "hardware_class": result.environment.hardware_class,
        "metric": variant.primary_metric,
        "previous": metric.baseline,
        "value": metric.candidate,
        "ratio": metric.ratio,
        "ci": list(metric.ci) if metric.ci else None,
    }
    webhooks.record(session, WebhookEvent.REGRESSION_FOUND, data, moment(session))
