"""Regressions: the new current result of a place on the leaderboard is worse than the one before it."""

from sqlalchemy.orm import Session

from optigpu.documents.administration import WebhookEvent
from optigpu.documents.result import Result
from optigpu.documents.views import Comparison, Decision
from optigpu.store import results, webhooks
from optigpu.store.database import moment


def look(session: Session, before: str | None, result: Result) -> None:
    """Writes the event if the result took the place of the result `before` and its primary metric is statistically
    worse. Nothing is compared where no webhook asks for the event."""
    if before is None or not webhooks.subscribers(session, WebhookEvent.REGRESSION_FOUND):
        return
    variant = result.variant
    comparison = _compared(session, before, result.id)
    metric = comparison.metrics.get(variant.primary_metric) if comparison else None
    if comparison is None or metric is None or metric.decision is not Decision.WORSE:
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


def _compared(session: Session, before: str, after: str) -> Comparison | None:
    """The comparison of two stored results; None if they cannot be compared."""
    from optigpu.statistics.compare import NotComparableError, compare  # here, because it loads numpy

    try:
        return compare(results.get(session, before), results.get(session, after))
    except NotComparableError:
        return None
