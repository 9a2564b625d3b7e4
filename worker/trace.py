"""The trace of one attempt at a job: a span for the attempt, and in it one for each variant."""

from optigpu.documents.result import Outcome
from optigpu.store import traces
from optigpu.store.leases import Lease
from optigpu.tracing import Span, SpanKind, Tracing, Value
from optigpu.vocabulary import StoreError, VariantStatus
from worker.context import WorkerContext


class AttemptTrace:
    """The spans of one attempt, within that of its `parent`. Nothing is recorded without a collector."""

    def __init__(self, tracing: Tracing, lease: Lease, parent: str | None = None) -> None:
        self._tracing = tracing
        facts: dict[str, Value] = {
            "job.id": lease.job_id,
            "job.attempt": lease.attempt,
            "worker.id": lease.worker_id,
        }
        self._attempt = self._tracing.start("attempt", SpanKind.CONSUMER, parent, facts)
        self._variants: dict[int, Span] = {}

    def variant_started(self, index: int) -> None:
        """The first process of a variant starts."""
        facts = {"variant.index": index}
        self._variants[index] = self._tracing.start(
            "variant", SpanKind.INTERNAL, self._attempt.address, facts
        )

    def variant_ended(self, outcome: Outcome) -> None:
        """A variant has ended. One that was never started has no span."""
        span = self._variants.pop(outcome.index, None)
        if span is not None:
            span.note({"variant.status": outcome.status.value})
            if outcome.status is VariantStatus.FAILED:
                span.fail(outcome.reason or "")
            span.end()

    def outcome(self, outcome: str, reason: str | None = None) -> None:
        """How the attempt ended."""
        self._attempt.note({"job.outcome": outcome})
        if outcome == "failed":
            self._attempt.fail(reason or "")

    def end(self) -> None:
        """The worker leaves the job, whatever became of it."""
        for span in (*self._variants.values(), self._attempt):
            span.end()
        self._variants.clear()


def parent_of(context: WorkerContext, job_id: str) -> str | None:
    """The span that posted the job; a database that is away costs the trace its beginning, and the job nothing."""
    if context.tracing.provider is None:
        return None
    try:
        return context.read(lambda session: traces.parent_of(session, job_id))
    except StoreError:
        return None
