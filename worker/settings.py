"""A worker's settings: environment variables that begin with OPTIGPU_."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from optigpu.paths import data_dir
from optigpu.store.database import default_url


class WorkerSettings(BaseSettings):
    """A worker's settings, besides the folders of `optigpu.paths`.

    Without `redis_url` it polls the database every `poll_s` seconds (embedded); with it, it is a Celery worker
    (service). `lease_s` is how long a job stays this worker's after its last sign of life.
    `heartbeat_file` is renewed with each sign of life: `worker.heartbeat_file`.
    """

    model_config = SettingsConfigDict(env_prefix="OPTIGPU_", frozen=True, env_ignore_empty=True)

    database_url: str = Field(default_factory=lambda: default_url(data_dir()))
    redis_url: str | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    lease_s: float = Field(30.0, ge=1, le=3600)
    poll_s: float = Field(1.0, gt=0, le=60)
    sweep_s: float = Field(5.0, gt=0, le=600)
    heartbeat_file: Path | None = None
