"""Reports the events of a running job, and traces them, for as long as this worker holds the job."""

from collections.abc import Callable
from typing import TypeVar, assert_never

import structlog

from optigpu.documents.events import (
    Estimated,
    Event,
    Finished,
    Noted,
    Planned,
    Printed,
    Progressed,
    RoughlyMeasured,
    VariantFinished,
    VariantStarted,
    Waiting,
)
from optigpu.documents.result import Attribution, Outcome
from optigpu.documents.views import JobView, ProgressView
from optigpu.store import queue, results
from optigpu.store.leases import Lease
from optigpu.tracing import Span, SpanKind, Tracing, Value
from optigpu.vocabulary import AttemptEndedError, FailureKind, JobState, StoreError, VariantStatus
from worker.context import Stopping, WorkerContext, retrying
from worker.heartbeat import Heartbeat, HeldJob, Interruption


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
        return context.read(lambda session: queue.parent_of(session, job_id))
    except StoreError:
        return None


T = TypeVar("T")
ENDS_THE_JOB = (Interruption.CANCELLED, Interruption.ALLOCATION_ENDED)
"""After these the run ends as usual, and keeps the replicates that are whole."""

log = structlog.stdlib.get_logger(__name__)


class Recorder:
    """The listener of a run: each event becomes a call of the held job, with the lease's fencing number.

    While the database, or the service, is away a call is made again, until the lease is lost or the worker is asked to
    stop. `stop` says what a request to stop is: a worker's own end, or that of a scheduler's allocation. Raises
    LeaseLostError through the run when another worker holds the job, so that the run stops. `saw_failure` says whether
    a variant or the whole job failed, and `saw_host_memory_end` whether the host had no memory left for one; `trace`
    has the spans of the attempt.
    """

    def __init__(
        self,
        job: HeldJob,
        heartbeat: Heartbeat,
        stopping: Stopping,
        trace: AttemptTrace,
        stop: Interruption = Interruption.STOPPING,
    ) -> None:
        self._job = job
        self._heartbeat = heartbeat
        self._stopping = stopping
        self._stop = stop
        self.trace = trace
        self.saw_failure = False
        self.saw_host_memory_end = False

    def __call__(self, event: Event) -> None:
        """Records one event of the run."""
        match event:
            case Planned() | Waiting() | Estimated() | VariantStarted() | RoughlyMeasured() | Printed():
                self._note(event)
            case Progressed():
                self._heartbeat.report(
                    ProgressView(fraction=event.fraction, doing=event.doing, remaining_s=event.remaining_s)
                )
            case VariantFinished():
                self._save(event.outcome)
            case Finished():
                pass  # the attribution is stored when the job ends
            case _:
                assert_never(event)

    def cancelled(self) -> str | None:
        """Why the job must end now, if it must; the run asks at least once a second.

        Raises AttemptEndedError if only this attempt must: what is unfinished is not recorded then.
        """
        found = self.interruption()
        if found is None or found in ENDS_THE_JOB:
            return found
        raise AttemptEndedError(found)

    def interruption(self) -> Interruption | None:
        """Why this attempt must stop now, if it must."""
        found = self._heartbeat.interruption()
        return self._stop if found is None and self._stopping.asked else found

    def earlier(self) -> dict[int, Outcome]:
        """The outcomes that earlier attempts have left, by their variants' indexes."""
        return self._retried(self._job.earlier)

    def stored(self) -> JobView:
        """The job as it is stored, with what earlier attempts have measured."""
        return self._retried(self._job.view)

    def finish(self, state: JobState, reason: str | None, attribution: Attribution | None = None) -> None:
        """Ends the job."""
        self.saw_failure = self.saw_failure or state is JobState.FAILED
        self._retried(lambda: self._job.finish(state, reason, attribution))
        self.trace.outcome(state.value, reason)
        log.info(f"job.{state}", reason=reason)

    def fail(self, kind: FailureKind, error: str) -> None:
        """Ends this attempt; what it failed of decides whether another follows."""
        self.saw_failure = True
        self._retried(lambda: self._job.fail(kind, error))
        self.trace.outcome(kind.value, error)
        log.warning("job.failed_attempt", failure=kind, reason=error)

    def release(self) -> None:
        """Hands the job back, so that another worker may take it at once."""
        self._retried(self._job.release)
        self.trace.outcome("released")
        log.info("job.released")

    def _note(self, event: Noted) -> None:
        self._retried(lambda: self._job.note(event))
        if isinstance(event, VariantStarted):
            self.trace.variant_started(event.index)
            log.info("variant.started", variant=event.index)
        elif isinstance(event, Waiting):
            log.info("job.waiting", doing=event.doing)

    def _save(self, outcome: Outcome) -> None:
        self.saw_failure = self.saw_failure or outcome.status is VariantStatus.FAILED
        self.saw_host_memory_end = self.saw_host_memory_end or outcome.host_memory
        # Read once and before the write: its transaction is short, and is tried again while the database is away.
        files = results.read_artifacts(outcome.artifacts)
        self._retried(lambda: self._job.save(outcome, files))
        self.trace.variant_ended(outcome)
        log.info(f"variant.{outcome.status}", variant=outcome.index, reason=outcome.reason)

    def _retried(self, call: Callable[[], T]) -> T:
        return retrying(call, self._worth_retrying)

    def _worth_retrying(self) -> bool:
        found = self.interruption()
        return found is None or found in ENDS_THE_JOB
