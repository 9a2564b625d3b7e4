"""A worker's housekeeping: notes that it is alive, requeues jobs of lost workers, rings for queued jobs."""

from collections.abc import Callable

import structlog

from optigpu.store import leases, queue, workers
from optigpu.store.errors import StoreUnavailableError
from worker.background import Background
from worker.context import WorkerContext

log = structlog.stdlib.get_logger(__name__)


class Sweeper(Background):
    """A thread that sweeps while a `with` block lasts, at once and then every `sweep_s` seconds.

    Any number of workers may sweep: each job is taken back once. `ring` tells workers of this kind
    to look for work and raises nothing when the broker is away; None where they look by themselves.
    """

    def __init__(self, context: WorkerContext, ring: Callable[[], None] | None = None) -> None:
        super().__init__("sweeper")
        self._context = context
        self._ring = ring

    def sweep(self) -> None:
        """One round. Raises StoreUnavailableError."""
        context = self._context
        context.write(lambda session: workers.seen(session, context.info.id, context.job_id))
        swept = context.write(leases.sweep)
        for state, ids in swept:
            for job_id in ids:
                log.warning(f"job.{state}", job_id=job_id, reason="its worker's lease ran out")
        if self._ring and context.read(lambda session: queue.waiting(session, context.info.device)):
            self._ring()

    def _run(self) -> None:
        settings = self._context.settings
        over = False
        while not over:
            try:
                self.sweep()
            except StoreUnavailableError as error:
                log.warning("database.away", reason=str(error))
            except Exception:  # without its sweeper a worker would look dead while it works
                log.exception("sweep.failed")
            over = self._over.wait(min(settings.sweep_s, settings.lease_s / 3))
