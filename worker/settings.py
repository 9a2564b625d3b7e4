"""A worker's settings: environment variables that begin with OPTIGPU_."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from optigpu.paths import data_dir
from optigpu.store.database import default_url
from optigpu.variables import DEFAULT_URL

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class WorkerSettings(BaseSettings):
    """A worker's settings, besides the folders of `optigpu.paths`.

    Without `redis_url` it polls the database every `poll_s` seconds (embedded); with it, it is a Celery worker
    (service). `lease_s` is how long a job stays this worker's after its last sign of life.
    `heartbeat_file` is renewed with each sign of life: `worker.heartbeat_file`.
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
