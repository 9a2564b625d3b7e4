"""What the engine says while it measures, written to the store for as long as the job is ours."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, assert_never

import structlog

from optigpu.documents.events import Event, Finished, Planned, Progressed, VariantFinished, VariantStarted
from optigpu.documents.result import Attribution, Outcome
from optigpu.documents.views import JobView, ProgressView
from optigpu.store import artifacts, jobs, outcomes
from optigpu.vocabulary import JobState
from worker.heartbeat import Heartbeat, Interruption
from worker.station import Station

P = ParamSpec("P")

log = structlog.stdlib.get_logger(__name__)


class Recorder:
    """The listener of a run: each event becomes a write with the claim's fencing number.

    While the database is away a write is tried again, until the lease is lost or the worker is told to end. Raises
    LeaseLostError through the run when the job is not ours any more, so that the run stops.
    """

    def __init__(self, station: Station, claim: jobs.Claim, heartbeat: Heartbeat) -> None:
        self._station = station
        self._claim = claim
        self._heartbeat = heartbeat

    def __call__(self, event: Event) -> None:
        """Takes one event of the run."""
        match event:
            case Planned():
                self._write(jobs.plan, event.variants)
            case VariantStarted():
                self._write(jobs.variant_started, event.index)
                log.info("variant.started", variant=event.index)
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

    def interruption(self) -> Interruption | None:
        """Why the run must stop now, if it must; what the run asks at least once a second."""
        found = self._heartbeat.interruption()
        return Interruption.STOPPING if found is None and self._station.stopping.asked else found

    def earlier(self) -> dict[int, Outcome]:
        """The outcomes that earlier attempts have left, by their variants' indexes."""
        return self._station.insist(self._worth_trying, outcomes.earlier, self._claim)

    def stored(self) -> JobView:
        """The job as the store has it, with what earlier attempts have measured."""
        return self._station.insist(self._worth_trying, jobs.get, self._claim.job_id)

    def finish(self, state: JobState, reason: str | None, attribution: Attribution | None = None) -> None:
        """Ends the job."""
        self._write(jobs.finish, state, reason, attribution)
        log.info(f"job.{state}", reason=reason)

    def release(self) -> None:
        """Hands the job back, so that another worker may take it at once."""
        self._write(jobs.release)
        log.info("job.released")

    def _save(self, outcome: Outcome) -> None:
        # Read once and before the write: its transaction is short, and is tried again while the database is away.
        self._write(jobs.save_outcome, outcome, artifacts.read(outcome.artifacts))
        log.info(f"variant.{outcome.status}", variant=outcome.index, reason=outcome.reason)

    def _write(
        self, store: Callable[Concatenate[Any, jobs.Claim, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        self._station.insist(self._worth_trying, store, self._claim, *args, **kwargs)

    def _worth_trying(self) -> bool:
        return self.interruption() in (None, Interruption.CANCELLED)
