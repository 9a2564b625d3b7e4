"""What a worker process works with, made once at its start: its settings, its device, the flag that stops it."""

import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import stamina
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from optigpu.conductor.processes.child import TASKS
from optigpu.conductor.tasks import prove
from optigpu.paths import data_dir
from optigpu.store.database import Database, Session, StoreUnavailableError, default_url
from optigpu.store.leases import Lease
from optigpu.store.workers import WorkerInfo
from optigpu.tracing import Tracing
from optigpu.variables import DEFAULT_URL

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class WorkerSettings(BaseSettings):
    """A worker's settings, besides the folders of `optigpu.paths`.

    Without `redis_url` it polls the database every `poll_s` seconds (embedded); with it, it is a Celery worker
    (service). `lease_s` is how long a job stays this worker's after its last sign of life.
    `heartbeat_file` is renewed with each sign of life: `worker.heartbeat`.
    """

    model_config = SettingsConfigDict(env_prefix="OPTIGPU_", frozen=True, env_ignore_empty=True)

    database_url: str = Field(default_factory=lambda: default_url(data_dir()))
    redis_url: str | None = None
    log_level: LogLevel = "INFO"
    lease_s: float = Field(30.0, ge=1, le=3600)
    poll_s: float = Field(1.0, gt=0, le=60)
    sweep_s: float = Field(5.0, gt=0, le=600)
    heartbeat_file: Path | None = None


class PilotSettings(BaseSettings):
    """Those of a pilot, which its launcher hands to it: where the service is, and the token of its job."""

    model_config = SettingsConfigDict(env_prefix="OPTIGPU_", frozen=True, env_ignore_empty=True)

    url: str = DEFAULT_URL
    pilot_token: SecretStr
    log_level: LogLevel = "INFO"


class LauncherSettings(BaseSettings):
    """Those of a launcher. `url` is where pilots reach the service; `launch_options` are further options of the
    scheduler's command, and `launch_setup` the shell lines that run before the pilot.

    `launch_at_once` is how many jobs it has with the scheduler at a time, and `launch_poll_s` how often it looks.
    """

    model_config = SettingsConfigDict(env_prefix="OPTIGPU_", frozen=True, env_ignore_empty=True)

    database_url: str = Field(default_factory=lambda: default_url(data_dir()))
    url: str = DEFAULT_URL
    log_level: LogLevel = "INFO"
    launch_options: str | None = None
    launch_setup: str | None = None
    launch_at_once: int = Field(100, ge=1, le=10000)
    launch_poll_s: float = Field(5.0, gt=0, le=600)


class Stopping:
    """Set once, by a signal handler, and asked by every loop of the worker.

    `threading.Event.set` may deadlock when a signal interrupts its own `wait`; `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        self.asked = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ask(self) -> None:
        """Tells the process to stop; safe in a signal handler."""
        self.asked = True
        self._wake.put(None)

    def wait(self, seconds: float) -> bool:
        """Sleeps for `seconds` or until `ask` is called; returns whether it was. For one thread only."""
        if not self.asked:
            with suppress(queue.Empty):
                self._wake.get(timeout=seconds)
        return self.asked


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
    proof: Sequence[str] = TASKS
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
