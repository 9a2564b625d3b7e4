"""The service's settings: environment variables that begin with OPTIGPU_."""

import ipaddress
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from optigpu.paths import data_dir
from optigpu.store.database import default_url
from optigpu.store.keys import LEAST_CHARACTERS

RATE_PATTERN = r"^[1-9]\d{0,8}/(second|minute|hour|day)$"


class ServiceSettings(BaseSettings):
    """The service's settings.

    Without `redis_url` it is embedded: it migrates its own database and starts a worker (unless `embedded_worker` is
    false). With it, it rings workers through Redis. `api_key` is a first key, with every scope.
    `rate_limit` is for each key, or for each address where there are no keys. `allowed_hosts` are names, separated by
    commas, by which a service that listens on loopback may be called besides localhost.
    """

    model_config = SettingsConfigDict(env_prefix="OPTIGPU_", frozen=True, env_ignore_empty=True)

    database_url: str = Field(default_factory=lambda: default_url(data_dir()))
    redis_url: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_key: SecretStr | None = Field(None, min_length=LEAST_CHARACTERS)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    lease_s: float = Field(30.0, ge=1, le=3600)
    rate_limit: str = Field("600/minute", pattern=RATE_PATTERN)
    max_body_bytes: int = Field(1_000_000, ge=1000, le=100_000_000)
    max_import_bytes: int = Field(50_000_000, ge=1000, le=1_000_000_000)
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    embedded_worker: bool = True

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return (
            tuple(name.strip() for name in value.split(",") if name.strip())
            if isinstance(value, str)
            else value
        )

    @property
    def embedded(self) -> bool:
        """Whether there is no broker: one process tree on one machine."""
        return self.redis_url is None

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own and no other's."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
