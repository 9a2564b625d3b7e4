"""Writes the events of a running job to the store, for as long as this worker holds the job."""

from collections.abc import Callable
from typing import TypeVar, assert_never

import structlog

from optigpu.documents.events import (
    Estimated,
    Event,
    Finished,
    Planned,
    Printed,
    Progressed,
    VariantFinished,
    VariantStarted,
    Waiting,
)
from optigpu.documents.result import Attribution, Outcome
from optigpu.documents.views import JobView, ProgressView
from optigpu.store import artifacts, jobs, leases, outcomes
from optigpu.store.database import Session
from optigpu.store.leases import Lease
from optigpu.vocabulary import AttemptEndedError, FailureKind, JobState, VariantStatus
from worker.context import WorkerContext, retrying
from worker.heartbeat import Heartbeat, Interruption
from worker.trace import AttemptTrace

T = TypeVar("T")

log = structlog.stdlib.get_logger(__name__)


class Recorder:
    """The listener of a run: each event becomes a write with the lease's fencing number.

    While the database is away a write is tried again, until the lease is lost or the worker is asked to stop. Raises
    LeaseLostError through the run when another worker holds the job, so that the run stops. `saw_failure` says whether
    a variant or the whole job failed, and `saw_host_memory_end` whether the host had no memory left for one; `trace`
    has the spans of the attempt.
    """

    def __init__(self, context: WorkerContext, lease: Lease, heartbeat: Heartbeat) -> None:
        self._context = context
        self._lease = lease
        self._heartbeat = heartbeat
        self.saw_failure = False
        self.saw_host_memory_end = False
        self.trace = AttemptTrace(context, lease)

    def __call__(self, event: Event) -> None:
        """Records one event of the run."""
        match event:
            case Planned():
                self._write(lambda session: outcomes.plan(session, self._lease, event.variants))
            case Waiting():
                self._write(lambda session: outcomes.waiting(session, self._lease, event))
                log.info("job.waiting", doing=event.doing)
            case Estimated():
                self._write(lambda session: outcomes.estimated(session, self._lease, event))
            case VariantStarted():
                self._start(event.index)
            case Progressed():
                self._heartbeat.report(
                    ProgressView(fraction=event.fraction, doing=event.doing, remaining_s=event.remaining_s)
                )
            case Printed():
                self._write(lambda session: outcomes.printed(session, self._lease, event))
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
        if found in (None, Interruption.CANCELLED):
            return found
        raise AttemptEndedError(found)

    def interruption(self) -> Interruption | None:
        """Why this attempt must stop now, if it must."""
        found = self._heartbeat.interruption()
        return Interruption.STOPPING if found is None and self._context.stopping.asked else found

    def earlier(self) -> dict[int, Outcome]:
        """The outcomes that earlier attempts have left, by their variants' indexes."""
        return self._read(lambda session: outcomes.earlier(session, self._lease))

    def stored(self) -> JobView:
        """The job as it is stored, with what earlier attempts have measured."""
        return self._read(lambda session: jobs.get(session, self._lease.job_id))

    def finish(self, state: JobState, reason: str | None, attribution: Attribution | None = None) -> None:
        """Ends the job."""
        self.saw_failure = self.saw_failure or state is JobState.FAILED
        self._write(lambda session: outcomes.finish(session, self._lease, state, reason, attribution))
        self.trace.outcome(state.value, reason)
        log.info(f"job.{state}", reason=reason)

    def fail(self, kind: FailureKind, error: str) -> None:
        """Ends this attempt; what it failed of decides whether another follows."""
        self.saw_failure = True
        self._write(lambda session: leases.fail(session, self._lease, kind, error))
        self.trace.outcome(kind.value, error)
        log.warning("job.failed_attempt", failure=kind, reason=error)

    def release(self) -> None:
        """Hands the job back, so that another worker may take it at once."""
        self._write(lambda session: leases.release(session, self._lease))
        self.trace.outcome("released")
        log.info("job.released")

    def _start(self, index: int) -> None:
        self._write(lambda session: outcomes.variant_started(session, self._lease, index))
        self.trace.variant_started(index)
        log.info("variant.started", variant=index)

    def _save(self, outcome: Outcome) -> None:
        self.saw_failure = self.saw_failure or outcome.status is VariantStatus.FAILED
        self.saw_host_memory_end = self.saw_host_memory_end or outcome.host_memory
        # Read once and before the write: its transaction is short, and is tried again while the database is away.
        files = artifacts.read(outcome.artifacts)
        self._write(lambda session: outcomes.save_outcome(session, self._lease, outcome, files))
        self.trace.variant_ended(outcome)
        log.info(f"variant.{outcome.status}", variant=outcome.index, reason=outcome.reason)

    def _read(self, query: Callable[[Session], T]) -> T:
        return retrying(lambda: self._context.read(query), self._worth_retrying)

    def _write(self, change: Callable[[Session], object]) -> None:
        retrying(lambda: self._context.write(change), self._worth_retrying)

    def _worth_retrying(self) -> bool:
        return self.interruption() in (None, Interruption.CANCELLED)
