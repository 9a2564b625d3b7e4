"""What earlier attempts of a job have measured, so that its attribution covers all of them."""

from optigpu.documents.result import Attribution, Outcome, Result
from optigpu.documents.views import VariantView
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.run import Report
from optigpu.store import results
from worker.context import WorkerContext


def whole_attribution(
    context: WorkerContext, report: Report, variants: tuple[VariantView, ...]
) -> Attribution:
    """The attribution of a job as if one attempt had measured every variant that ended.

    `variants` are the job's, as stored. The store keeps an earlier outcome only when it comes from this host and
    version, so that its documents are today's.
    """
    now = {outcome.index: outcome for outcome in report.outcomes}
    before = {view.index: _outcome(context, view) for view in variants if view.index not in now}
    return attribute(report.spec, variants_of(report.spec), before | now) if before else report.attribution


def _outcome(context: WorkerContext, view: VariantView) -> Outcome:
    result_id = view.result_id
    if result_id is None:
        return Outcome(index=view.index, status=view.status, reason=view.reason)
    document = context.read(lambda session: results.get(session, result_id))
    samples = context.read(lambda session: results.samples(session, result_id)).samples
    return Outcome(
        index=view.index, status=view.status, result=Result.model_validate(document), samples=samples
    )
