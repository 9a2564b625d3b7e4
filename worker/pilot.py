"""The pilot: measures one job in the allocation of a cluster's scheduler, with nothing but HTTP to the service.

It opens no port, and needs no shared disk, no database and no broker.
"""

import base64
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import structlog
from pydantic import BaseModel

from optigpu import __version__
from optigpu.documents.events import Noted
from optigpu.documents.pilots import (
    Fail,
    Finish,
    PilotBeat,
    PilotBeatAnswer,
    PilotEnd,
    PilotEvent,
    PilotFile,
    PilotOutcome,
    Release,
)
from optigpu.documents.result import Attribution, Outcome
from optigpu.documents.views import JobView, ProgressView
from optigpu.paths import lock_dir
from optigpu.store.artifacts import Artifact
from optigpu.store.launches import PilotLease
from optigpu.store.leases import Lease
from optigpu.tracing import Tracing
from optigpu.vocabulary import DeviceKind, FailureKind, JobState, OptiGPUError
from worker.capabilities import serving
from worker.context import DeviceContext, retrying
from worker.execute import measure
from worker.heartbeat import Heartbeat, Interruption
from worker.recorder import Recorder
from worker.service_calls import ServiceCalls
from worker.settings import PilotSettings
from worker.trace import AttemptTrace

REACHES_WITHIN_S = 600.0
"""How long it looks for the service before it gives its allocation back."""
MOST_FILES_BYTES = 24 * 2**20
"""The compressed files of one outcome that are sent; the service reads no longer body than OPTIGPU_MAX_IMPORT_BYTES."""

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True)
class RemoteJob:
    """A held job, by HTTP."""

    calls: ServiceCalls
    lease: Lease

    def heartbeat(self, progress: ProgressView | None) -> bool:
        beat = PilotBeat(fencing=self.lease.fencing, progress=progress)
        answer = PilotBeatAnswer.model_validate_json(self.calls.call("POST", "heartbeat", beat))
        return answer.cancel_requested

    def note(self, event: Noted) -> None:
        self.calls.call("POST", "events", PilotEvent(fencing=self.lease.fencing, event=event))

    def save(self, outcome: Outcome, files: Sequence[Artifact]) -> None:
        plain = outcome.model_copy(update={"artifacts": {}})
        sent = PilotOutcome(fencing=self.lease.fencing, outcome=plain, files=_sent(files))
        self.calls.call("POST", "outcomes", sent)

    def earlier(self) -> dict[int, Outcome]:
        """None: each allocation begins anew, so that a ladder stays within one."""
        return {}

    def view(self) -> JobView:
        return JobView.model_validate_json(self.calls.call("GET", "job"))

    def finish(self, state: JobState, reason: str | None, attribution: Attribution | None) -> None:
        self._end(Finish(state=state, reason=reason, attribution=attribution))

    def fail(self, kind: FailureKind, error: str) -> None:
        self._end(Fail(failure=kind, reason=error))

    def release(self) -> None:
        self._end(Release())

    def _end(self, end: Finish | Fail | Release) -> None:
        self.calls.call("POST", "end", PilotEnd(fencing=self.lease.fencing, end=end))


def run_once(job_id: str, device: DeviceKind | None, settings: PilotSettings, tracing: Tracing) -> None:
    """Claims the job, measures it, and reports how it ended.

    Raises OptiGPUError when that cannot be done: the scheduler sees the exit status, and the service the lease.
    """
    with (
        closing(ServiceCalls(settings.url, settings.pilot_token.get_secret_value())) as calls,
        serving(device, lock_dir()) as info,
    ):
        context = DeviceContext(info=info, tracing=tracing)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: context.stopping.ask())
        _require_same_job(context, calls, job_id)
        context.prove_device()
        before = time.monotonic()
        claimed = PilotLease.model_validate_json(_reached(context, calls, "POST", "claim", info))
        _measure(context, RemoteJob(calls, claimed.lease), claimed.lease_s, before)


def _measure(context: DeviceContext, job: RemoteJob, lease_s: float, before: float) -> None:
    lease = job.lease
    heartbeat = Heartbeat(job, lease_s, claimed_at=before)
    trace = AttemptTrace(context.tracing, lease)
    recorder = Recorder(job, heartbeat, context.stopping, trace, Interruption.ALLOCATION_ENDED)
    with structlog.contextvars.bound_contextvars(job_id=lease.job_id, attempt=lease.attempt), heartbeat:
        log.info("job.claimed", fencing=lease.fencing, version=__version__)
        try:
            measure(context, lease, recorder)
        finally:
            trace.end()


def _require_same_job(context: DeviceContext, calls: ServiceCalls, job_id: str) -> None:
    of_token = JobView.model_validate_json(_reached(context, calls, "GET", "job"), extra="ignore").id
    if of_token != job_id:
        raise OptiGPUError(f"OPTIGPU_PILOT_TOKEN is for job {of_token}, and --job says {job_id}.")


def _reached(
    context: DeviceContext, calls: ServiceCalls, method: str, path: str, body: BaseModel | None = None
) -> bytes:
    """The answer of a service that may be away for a while."""
    until = time.monotonic() + REACHES_WITHIN_S
    return retrying(
        lambda: calls.call(method, path, body),
        lambda: not context.stopping.asked and time.monotonic() < until,
    )


def _sent(files: Sequence[Artifact]) -> tuple[PilotFile, ...]:
    """The files as they are sent: none that would make the body too long."""
    left, found = MOST_FILES_BYTES, []
    for file in files:
        size = len(file.data or b"")
        fits = size <= left
        left -= size if fits else 0
        found.append(
            PilotFile(
                name=file.name,
                media_type=file.media_type,
                size_bytes=file.size_bytes,
                sha256=file.sha256 if fits else None,
                reason=file.reason if fits else "It was too large to be sent to the service.",
                data=base64.b64encode(file.data).decode() if fits and file.data is not None else None,
            )
        )
    return tuple(found)
