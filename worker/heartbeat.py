"""A running job's heartbeat: a thread that extends its lease and learns when the job must stop."""

import contextvars
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import structlog

from optigpu.documents.events import Noted
from optigpu.documents.result import Attribution, Outcome
from optigpu.documents.views import JobView, ProgressView
from optigpu.store import jobs, leases, outcomes
from optigpu.store.database import StoreUnavailableError
from optigpu.store.leases import Lease
from optigpu.store.results import Artifact
from optigpu.vocabulary import FailureKind, JobState, LeaseLostError, OptiGPUError
from worker.context import WorkerContext


class HeldJob(Protocol):
    """The calls of a worker for the job of its lease: in the database, or by HTTP where there is none.

    Each raises StoreUnavailableError if it may be made again, and LeaseLostError if another worker holds the job.
    """

    @property
    def lease(self) -> Lease: ...

    def heartbeat(self, progress: ProgressView | None) -> bool:
        """Extends the lease; returns whether a cancel was requested."""
        ...

    def note(self, event: Noted) -> None: ...

    def save(self, outcome: Outcome, files: Sequence[Artifact]) -> None: ...

    def earlier(self) -> dict[int, Outcome]:
        """The outcomes that earlier attempts have left, by their variants' indexes."""
        ...

    def view(self) -> JobView: ...

    def finish(self, state: JobState, reason: str | None, attribution: Attribution | None) -> None: ...

    def fail(self, kind: FailureKind, error: str) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True)
class StoredJob:
    """A held job in the database."""

    context: WorkerContext
    lease: Lease

    def heartbeat(self, progress: ProgressView | None) -> bool:
        lease_s = self.context.settings.lease_s
        return self.context.write(lambda session: leases.heartbeat(session, self.lease, lease_s, progress))

    def note(self, event: Noted) -> None:
        self.context.write(lambda session: outcomes.note(session, self.lease, event))

    def save(self, outcome: Outcome, files: Sequence[Artifact]) -> None:
        self.context.write(lambda session: outcomes.save_outcome(session, self.lease, outcome, files))

    def earlier(self) -> dict[int, Outcome]:
        return self.context.read(lambda session: outcomes.earlier(session, self.lease))

    def view(self) -> JobView:
        return self.context.read(lambda session: jobs.get(session, self.lease.job_id))

    def finish(self, state: JobState, reason: str | None, attribution: Attribution | None) -> None:
        self.context.write(lambda session: outcomes.finish(session, self.lease, state, reason, attribution))

    def fail(self, kind: FailureKind, error: str) -> None:
        self.context.write(lambda session: leases.fail(session, self.lease, kind, error))

    def release(self) -> None:
        self.context.write(lambda session: leases.release(session, self.lease))


LAST_ROUND_S = 5.0
"""How long the end of the block waits for a round that hangs in a database that is away."""


class Background(ABC):
    """The base class of such work. `_over` is set at the end of the block.

    The thread logs as the block does: with the job's id, for example.
    """

    def __init__(self, name: str) -> None:
        self._over = threading.Event()
        self._name = name
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        block = contextvars.copy_context()
        self._thread = threading.Thread(target=block.run, args=(self._run,), name=self._name, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(LAST_ROUND_S)

    @abstractmethod
    def _run(self) -> None:
        """Rounds of work, with waits for `_over` in between; raises nothing."""


BEAT_S = 1.0
"""How soon a request to cancel is noticed; progress is written no more often than this."""

log = structlog.stdlib.get_logger(__name__)


class Interruption(StrEnum):
    """Why a job is stopped before its end."""

    CANCELLED = "Cancelled on request."
    DATABASE_AWAY = "The lease ran out while the database was away."
    LEASE_LOST = "The lease ran out; another worker may hold the job by now."
    NOT_EXTENDED = (
        "The worker could not extend its lease because of an error of its own; its log shows the error."
    )
    STOPPING = "The worker was asked to stop."
    ALLOCATION_ENDED = "The scheduler ended the job's allocation."


class Heartbeat(Background):
    """Keeps a lease of `lease_s` seconds while a `with` block lasts.

    `claimed_at` is the monotonic time just before the claim. The lease counts as lost if the database says so, or if it
    could not be extended in time: from then on another worker may hold the job. If an unexpected error keeps it from
    being extended, the heartbeat gives up while a third of the lease is left, so that the job can end with a reason.
    """

    def __init__(self, job: HeldJob, lease_s: float, claimed_at: float) -> None:
        super().__init__("heartbeat")
        self._job = job
        self._lease_s = lease_s
        self._held_until = claimed_at + self._lease_s
        self._progress: ProgressView | None = None
        self._cancel_requested = False
        self._refused = False
        self._failing = False
        self._away = False
        self._gave_up = False

    def report(self, progress: ProgressView) -> None:
        """Takes the newest progress; the next beat writes it."""
        self._progress = progress

    def interruption(self) -> Interruption | None:
        """Why the job must stop now, if it must. Never waits for the database."""
        if self._refused:
            return Interruption.LEASE_LOST
        left_s = self._held_until - time.monotonic()
        self._gave_up = self._gave_up or (self._failing and left_s < self._lease_s / 3)
        if self._gave_up:
            return Interruption.NOT_EXTENDED
        if left_s < 0:
            return Interruption.DATABASE_AWAY if self._away else Interruption.LEASE_LOST
        return Interruption.CANCELLED if self._cancel_requested else None

    def _run(self) -> None:
        while not self._refused and not self._over.wait(min(BEAT_S, self._lease_s / 3)):
            try:
                self._beat()
                self._failing = self._away = False
            except LeaseLostError:
                self._refused = True
            except StoreUnavailableError as error:
                self._failing, self._away = False, True
                log.warning("database.away", reason=str(error))
            except Exception:  # without its heartbeat the job would count as lost
                self._failing = True
                log.exception("heartbeat.failed")

    def _beat(self) -> None:
        asked_at = time.monotonic()
        asked = self._job.heartbeat(self._progress)
        self._held_until = asked_at + self._lease_s
        self._cancel_requested = asked


def renew(path: Path, lease_s: float) -> None:
    """Says in a file that the worker is alive for another `lease_s` seconds, for a container's health check.

    The file's modification time lies in the future: it is when the last sign of life expires. So a check needs no
    Python, which would take a core from what is measured: `test -n "$(find FILE -newermt now)"`.

    Raises OptiGPUError if it cannot be written.
    """
    until = time.time() + lease_s
    try:
        path.touch()
        os.utime(path, (until, until))
    except OSError as error:
        raise OptiGPUError(
            f"The heartbeat file {path} cannot be written ({error.strerror}); name another with OPTIGPU_HEARTBEAT_FILE."
        ) from error
