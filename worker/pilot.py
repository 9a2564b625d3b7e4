"""The pilot: measures one job in the allocation of a cluster's scheduler, with nothing but HTTP to the service.

It opens no port, and needs no shared disk, no database and no broker.
"""

import base64
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import httpx
import structlog
from pydantic import BaseModel

from optigpu import __version__
from optigpu.documents.events import (
    Fail,
    Finish,
    Noted,
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
from optigpu.http_clients import http_client, proxy_at_fault
from optigpu.paths import lock_dir
from optigpu.proxies import is_loopback
from optigpu.store.database import StoreUnavailableError
from optigpu.store.launches import PilotLease
from optigpu.store.leases import Lease
from optigpu.store.results import Artifact
from optigpu.tracing import Tracing
from optigpu.vocabulary import DeviceKind, FailureKind, JobState, LeaseLostError, OptiGPUError
from worker.capabilities import serving
from worker.context import DeviceContext, PilotSettings, retrying
from worker.execute import measure
from worker.heartbeat import Heartbeat, Interruption
from worker.recorder import AttemptTrace, Recorder

TIMEOUT = httpx.Timeout(10.0, read=30.0, write=60.0)
GONE = (401, 404, 409, 410)
"""The token, the job or the lease has ended."""


class ServiceCalls:
    """Raises OptiGPUError for an address that would show the token to the network, or a proxy that cannot be used."""

    def __init__(self, url: str, token: str) -> None:
        self._url = confidential(url)
        headers = {"Authorization": f"Bearer {token}"}
        self._http = http_client(self._url, headers=headers, timeout=TIMEOUT)

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: BaseModel | None = None) -> bytes:
        """The answer's body.

        Raises StoreUnavailableError if the same call may succeed later, LeaseLostError if the job is no longer this
        pilot's, OptiGPUError if the service refuses what was sent.
        """
        content = None if body is None else body.model_dump_json()
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            answer = self._http.request(method, f"/v1/pilot/{path}", content=content, headers=headers)
        except httpx.TransportError as error:
            at_fault = proxy_at_fault(self._url, error)
            raise StoreUnavailableError(
                f"The service at {self._url} cannot be reached: {at_fault}."
                if at_fault
                else f"The service at {self._url} does not answer ({error})."
            ) from error
        if answer.is_success:
            return answer.content
        detail = _detail(answer)
        if answer.status_code in GONE:
            raise LeaseLostError(detail)
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise StoreUnavailableError(detail)
        raise OptiGPUError(detail)


def confidential(url: str) -> str:
    """The address, if it is https or on this machine. Raises OptiGPUError for another one."""
    try:
        parsed = httpx.URL(url.rstrip("/"))
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.host and (parsed.scheme == "https" or (parsed.scheme == "http" and is_loopback(parsed.host))):
        return str(parsed)
    raise OptiGPUError(
        f"Pilots send their tokens to OPTIGPU_URL, which is {url!r}; set it to https://HOST. "
        "Only a service on the same machine may have http://."
    )


def _detail(answer: httpx.Response) -> str:
    """The sentence of a problem document."""
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    said = problem.get("detail") if isinstance(problem, dict) else None
    return str(said or f"The service answered {answer.status_code}.")


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
