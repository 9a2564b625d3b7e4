"""The service's settings: environment variables that begin with OPTIGPU_."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from optigpu.documents.fields import describe_settings
from optigpu.paths import data_dir
from optigpu.proxies import is_loopback
from optigpu.store.database import default_url
from optigpu.store.keys import LEAST_CHARACTERS
from optigpu.vocabulary import OptiGPUError, UnsupportedError

RATE_PATTERN = r"^[1-9]\d{0,8}/(second|minute|hour|day)$"
PATH_PATTERN = re.compile(r"[\w.~-]*(/[\w.~-]+)*", re.ASCII)
ORIGIN_PATTERN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:\d{1,5})?")
PREFIX = "OPTIGPU_"
Names = Annotated[tuple[str, ...], NoDecode]
"""Names separated by commas."""


class ServiceSettings(BaseSettings):
    """The service's settings.

    Without `redis_url` it is embedded: it migrates its own database and starts a worker (unless `embedded_worker` is
    false). With it, it rings workers through Redis. `api_key` is a first key, with every scope.
    `rate_limit` is for each key, or for each address where there are no keys; `device_rate_limit` for each edge device.
    `allowed_hosts` are names, separated by commas, by which a service that listens on loopback may be called besides
    localhost. With `public_read` a caller
    without a key may read where keys are needed. `root_path` is where a proxy puts the service, "/optigpu" for example:
    every link begins with it. With fewer than `min_free_bytes` on the disk of its data it is not ready.
    `cors_origins` are the pages of other origins that may call it; none may by default. With `hsts_s` browsers are told
    to use https alone for so many seconds. `webhook_allowed_hosts` are hosts that webhooks may lead to although their
    addresses are private, or by http. A browser stays signed in for `session_s` seconds. Without `mcp` there is no
    endpoint for programs that talk.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, env_ignore_empty=True)

    database_url: str = Field(default_factory=lambda: default_url(data_dir()))
    redis_url: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_key: SecretStr | None = Field(None, min_length=LEAST_CHARACTERS)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    lease_s: float = Field(30.0, ge=1, le=3600)
    rate_limit: str = Field("600/minute", pattern=RATE_PATTERN)
    device_rate_limit: str = Field("120/minute", pattern=RATE_PATTERN)
    max_body_bytes: int = Field(1_000_000, ge=1000, le=100_000_000)
    max_import_bytes: int = Field(50_000_000, ge=1000, le=1_000_000_000)
    min_free_bytes: int = Field(100_000_000, ge=0)
    allowed_hosts: Names = ()
    cors_origins: Names = ()
    hsts_s: int = Field(0, ge=0, le=63_072_000)
    webhook_allowed_hosts: Names = ()
    embedded_worker: bool = True
    public_read: bool = False
    root_path: str | None = None
    session_s: int = Field(28_800, ge=60, le=604_800)
    mcp: bool = True

    @field_validator("allowed_hosts", "cors_origins", "webhook_allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return (
            tuple(name.strip() for name in value.split(",") if name.strip())
            if isinstance(value, str)
            else value
        )

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not ORIGIN_PATTERN.fullmatch(origin):
                raise ValueError("write origins such as https://bench.example.org, without a path")
        return value

    @field_validator("root_path")
    @classmethod
    def _with_one_slash(cls, value: str | None) -> str | None:
        """With a slash at its beginning and none at its end; None for the root itself."""
        path = (value or "").strip("/")
        if not PATH_PATTERN.fullmatch(path):
            raise ValueError("write a path such as /optigpu, of letters, digits and . _ ~ - between slashes")
        return f"/{path}" if path else None

    @property
    def prefix(self) -> str:
        """What every link begins with: "/optigpu" for example, or nothing."""
        return self.root_path or ""

    @property
    def embedded(self) -> bool:
        """Whether there is no broker: one process tree on one machine."""
        return self.redis_url is None

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)


class SettingsError(OptiGPUError):
    """The settings do not allow the service to start."""


def read_settings(**given: Any) -> ServiceSettings:
    """The settings of the environment, and those that are given. Raises SettingsError that names each that is wrong."""
    try:
        return ServiceSettings(**given)
    except ValidationError as error:
        raise SettingsError(describe_settings(error, PREFIX)) from None
    except UnsupportedError as error:  # there is no data folder
        raise SettingsError(str(error)) from None
