"""A worker's housekeeping: says that it lives and which models it has, takes lost jobs back, repeats lost messages.

It also says what the worker could not while the database was away: that its attempt ended because of that.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from optigpu.store import leases, queue, workers
from optigpu.store.database import StoreUnavailableError, moment
from optigpu.vocabulary import FailureKind, LeaseLostError
from worker import heartbeat
from worker.capabilities import with_models
from worker.context import WorkerContext
from worker.heartbeat import Background

MOST_SENT = 100
"""How many lost messages one round sends; the next round sends more when those are gone."""

log = structlog.stdlib.get_logger(__name__)
SENTENCE = "The worker could not reach the database for longer than its lease."


class Sweeper(Background):
    """A thread that sweeps while a `with` block lasts, at once and then every `sweep_s` seconds.

    Any number of workers may sweep: each job is taken back once. `send` tells workers of this kind of jobs that wait
    and raises nothing when the broker is away; None where they look by themselves.
    """

    def __init__(self, context: WorkerContext, send: Callable[[Sequence[str]], None] | None = None) -> None:
        super().__init__("sweeper")
        self._context = context
        self._send = send

    def sweep(self) -> None:
        """One round. Raises StoreUnavailableError, and OptiGPUError for a heartbeat file that cannot be written."""
        context = self._context
        context.write(lambda session: workers.seen(session, context.info.id, context.job_id))
        if context.settings.heartbeat_file:
            heartbeat.renew(context.settings.heartbeat_file, context.settings.lease_s)
        if context.job_id is None:  # nothing searches the disk while a job is measured
            self._note_models()
        settle(context)
        swept = context.write(leases.sweep)
        for state, ids in swept:
            why = "its deadline passed" if state == "overdue" else "its worker's lease ran out"
            for job_id in ids:
                log.warning(f"job.{state}", job_id=job_id, reason=why)
        self.ring()

    def ring(self) -> None:
        """Sends messages for jobs that wait, if there are any and messages may be lost."""
        if self._send is None:
            return
        try:
            waiting = self._context.read(
                lambda session: queue.due(session, self._context.info.device, moment(session), MOST_SENT)
            )
        except StoreUnavailableError as error:
            log.warning("database.away", reason=str(error))
            return
        if waiting:
            self._send(waiting)

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


def settle(context: WorkerContext) -> None:
    """Says it, unless another worker has taken the job back meanwhile. Raises StoreUnavailableError."""
    lease = context.owed
    if lease is None:
        return
    with suppress(LeaseLostError):
        context.write(lambda session: leases.fail(session, lease, FailureKind.DATABASE_AWAY, SENTENCE))
    context.owed = None
