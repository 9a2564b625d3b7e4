"""A running job's heartbeat: a thread that extends its lease and learns when the job must stop."""

import time
from enum import StrEnum

import structlog

from optigpu.documents.views import ProgressView
from optigpu.store.errors import StoreUnavailableError
from optigpu.vocabulary import LeaseLostError
from worker.background import Background
from worker.held import HeldJob

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
