"""What a worker process works with, made once at its start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import stamina

from optigpu.conductor.proof import PROOF, prove
from optigpu.store.database import Database, Session
from optigpu.store.errors import StoreUnavailableError
from optigpu.store.leases import Lease
from optigpu.store.workers import WorkerInfo
from optigpu.tracing import Tracing
from worker.settings import WorkerSettings
from worker.stopping import Stopping

T = TypeVar("T")


@dataclass(kw_only=True)
class DeviceContext:
    """One device and who measures on it: any worker, and the pilot of a cluster's allocation, which has no database.

    `stopping` is the flag that stops it. `in_doubt` says that a variant failed since the device was last proven, and
    `lost` why the device no longer works. `proof` is the program that proves it, and `tracing` records traces.
    """

    info: WorkerInfo
    stopping: Stopping = field(default_factory=Stopping)
    in_doubt: bool = False
    lost: str | None = None
    proof: Sequence[str] = PROOF
    tracing: Tracing = field(default_factory=Tracing)

    def prove_device(self) -> None:
        """Raises UnsupportedError if the device does not work, CancelledError if the worker is to stop meanwhile."""
        prove(self.info.device, cancelled=self._reason_to_stop, program=self.proof)

    def _reason_to_stop(self) -> str | None:
        return "The worker was asked to stop." if self.stopping.asked else None


@dataclass(kw_only=True)
class WorkerContext(DeviceContext):
    """One worker of the service: its database, its settings, and the job that it works on.

    `owed` is the lease of a job that it had to give up while the database was away: `worker.sweeper`.
    """

    database: Database
    settings: WorkerSettings
    job_id: str | None = None
    owed: Lease | None = None

    def write(self, change: Callable[[Session], T]) -> T:
        """One transaction of its own. Raises StoreUnavailableError when the database is away."""
        with self.database.write() as session:
            return change(session)

    def read(self, query: Callable[[Session], T]) -> T:
        """One state of the database. Raises StoreUnavailableError when the database is away."""
        with self.database.read() as session:
            return query(session)


def retrying(attempt: Callable[[], T], worth_retrying: Callable[[], bool]) -> T:
    """Calls `attempt` again while the database is away and `worth_retrying` is true.

    It takes no arguments, because stamina logs the arguments of each retry.
    """

    def again(error: Exception) -> bool:
        return isinstance(error, StoreUnavailableError) and worth_retrying()

    return stamina.RetryingCaller(attempts=None, timeout=None, wait_max=1.0)(again, attempt)
