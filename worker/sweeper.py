"""A worker's housekeeping: says that it lives and which models it has, takes lost jobs back, rings for queued ones."""

from collections.abc import Callable

import structlog

from optigpu.store import leases, queue, workers
from optigpu.store.errors import StoreUnavailableError
from worker import heartbeat_file
from worker.background import Background
from worker.capabilities import with_models
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
        """One round. Raises StoreUnavailableError, and OptiGPUError for a heartbeat file that cannot be written."""
        context = self._context
        context.write(lambda session: workers.seen(session, context.info.id, context.job_id))
        if context.settings.heartbeat_file:
            heartbeat_file.renew(context.settings.heartbeat_file, context.settings.lease_s)
        if context.job_id is None:  # nothing searches the disk while a job is measured
            self._note_models()
        swept = context.write(leases.sweep)
        for state, ids in swept:
            for job_id in ids:
                log.warning(f"job.{state}", job_id=job_id, reason="its worker's lease ran out")
        if self._ring and context.read(lambda session: queue.waiting(session, context.info.device)):
            self._ring()

    def _note_models(self) -> None:
        """Models that were added or removed since the last round."""
        now = with_models(self._context.info)
        if now != self._context.info:
            self._context.write(lambda session: workers.note_models(session, now))
            self._context.info = now

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
