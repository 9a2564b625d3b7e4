"""The housekeeping of a worker: it says that it lives, takes back what others have lost, rings for what waits."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

from optigpu.store import jobs, workers
from optigpu.store.errors import StoreUnavailableError
from worker.station import Station

LAST_SWEEP_S = 5.0
"""How long the end of a worker waits for a sweep that hangs in a database that is away."""

log = structlog.stdlib.get_logger(__name__)


class Sweeper:
    """A thread that sweeps while a `with` block lasts, at once and then every `sweep_s` seconds.

    Any number of workers may sweep: what one has taken back is gone for the next. `ring` tells workers of this kind
    to look for work and raises nothing when the broker is away; None where they look by themselves.
    """

    def __init__(self, station: Station, ring: Callable[[], None] | None = None) -> None:
        self._station = station
        self._ring = ring
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_sweeping, name="sweeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(LAST_SWEEP_S)

    def sweep(self) -> None:
        """One round. Raises StoreUnavailableError."""
        station = self._station
        station.write(workers.seen, station.info.id, station.job_id)
        swept = station.write(jobs.sweep)
        for state, ids in swept:
            for job_id in ids:
                log.warning(f"job.{state}", job_id=job_id, reason="its worker's lease ran out")
        if self._ring and station.read(jobs.queued_count, station.info.device):
            self._ring()

    def _keep_sweeping(self) -> None:
        settings = self._station.settings
        over = False
        while not over:
            try:
                self.sweep()
            except StoreUnavailableError as error:
                log.warning("database.away", reason=str(error))
            except Exception:  # without its sweeper a worker would look dead while it works
                log.exception("sweep.failed")
            over = self._over.wait(min(settings.sweep_s, settings.lease_s / 3))
