"""Objects that all requests share, created once by `create_app`."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from api.deliveries import Deliveries
from api.doorbell import Doorbell
from api.feeds import Feeds
from api.gate import Gate
from api.key_uses import KeyUses
from api.limits import RateLimiter
from api.metrics import Metrics
from api.settings import ServiceSettings
from optigpu.store.database import Database
from optigpu.tracing import Tracing


@dataclass(frozen=True)
class Service:
    """The objects that all requests share."""

    settings: ServiceSettings
    database: Database
    doorbell: Doorbell
    gate: Gate
    limiter: RateLimiter
    device_limiter: RateLimiter
    feeds: Feeds
    key_uses: KeyUses
    deliveries: Deliveries
    metrics: Metrics
    tracing: Tracing


async def service_of(request: Request) -> Service:
    """The service that a request came to. It waits for nothing, and so needs no thread."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(service_of)]
