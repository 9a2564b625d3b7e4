"""What a worker process works with, made once at its start."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import stamina

from optigpu.store.database import Database
from optigpu.store.errors import StoreUnavailableError
from optigpu.store.workers import WorkerInfo
from worker.settings import Settings
from worker.stopping import Stopping

T = TypeVar("T")
P = ParamSpec("P")


@dataclass
class Station:
    """One worker: who it is, its database, its settings, whether it shall end, and the job that it works on."""

    info: WorkerInfo
    database: Database
    settings: Settings
    stopping: Stopping = field(default_factory=Stopping)
    job_id: str | None = None

    def write(self, store: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function of the store in a transaction of its own.

        Raises StoreUnavailableError when the database is away.
        """
        with self.database.write() as session:
            return store(session, *args, **kwargs)

    def insist(
        self,
        while_: Callable[[], bool],
        store: Callable[Concatenate[Any, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Like `write`, but when the database is away it tries again for as long as `while_` says."""

        def again(error: Exception) -> bool:
            return isinstance(error, StoreUnavailableError) and while_()

        def attempt() -> T:  # without arguments, which the log of a retry would show whole
            return self.write(store, *args, **kwargs)

        return stamina.RetryingCaller(attempts=None, timeout=None, wait_max=1.0)(again, attempt)

    def read(self, store: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function of the store that changes nothing. Raises StoreUnavailableError."""
        with self.database.read() as session:
            return store(session, *args, **kwargs)
