"""Creates the FastAPI application from the settings."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from api import pages, problems
from api.deliveries import Deliveries
from api.doorbell import Doorbell
from api.embedded import embedded_worker
from api.feeds import Feeds
from api.gate import Gate
from api.kept_pages import KeptPages
from api.key_uses import KeyUses
from api.limits import RateLimiter
from api.mcp import endpoint as mcp_endpoint
from api.metrics import Metrics
from api.middleware import HostGuard, RequestContext
from api.openapi import DocumentedApp
from api.parameters import refuse_unknown_parameters
from api.routes import (
    alerts,
    audit,
    compare,
    devices,
    edge_leaderboard,
    edge_models,
    events,
    hardware,
    health,
    history,
    imports,
    jobs,
    leaderboard,
    pilots,
    preview,
    results,
    schema,
    webhooks,
    workers,
)
from api.service import Service
from api.settings import ServiceSettings
from optigpu import __version__
from optigpu.store.database import Database
from optigpu.tracing import tracing

ROUTERS = (
    leaderboard,
    jobs,
    preview,
    imports,
    events,
    results,
    history,
    audit,
    compare,
    edge_leaderboard,
    devices,
    edge_models,
    webhooks,
    alerts,
    workers,
    pilots,
    hardware,
    schema,
    health,
    pages,
)
COMPRESSED_FROM_BYTES = 1000
COMPRESSION_LEVEL = 5
CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST", "DELETE"),
    "allow_headers": ("Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID"),
    "expose_headers": ("ETag", "Link", "Location", "Retry-After", "X-Request-ID"),
}
"""What pages of allowed origins may send and see. No cookie goes with their calls: they are known by their keys."""


def create_app(settings: ServiceSettings) -> FastAPI:
    """The application. The database is not touched before the first request."""
    app = DocumentedApp(
        dependencies=[Depends(refuse_unknown_parameters)],
        lifespan=_lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service = _service(settings)
    problems.install(app)
    for module in ROUTERS:
        app.include_router(module.router)
    app.state.mcp = mcp_endpoint.mount(app, service)
    # The last one added is the outermost.
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESSED_FROM_BYTES, compresslevel=COMPRESSION_LEVEL)
    app.add_middleware(KeptPages, gate=service.gate)
    if settings.on_loopback:
        app.add_middleware(HostGuard, allowed=settings.allowed_hosts, origins=settings.cors_origins)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origins, **CORS)
    app.add_middleware(
        RequestContext,
        metrics=service.metrics,
        tracing=service.tracing,
        prefix=settings.prefix,
        hsts_s=settings.hsts_s,
    )
    return app


def _service(settings: ServiceSettings) -> Service:
    database = Database(settings.database_url)
    limiter, key_uses = RateLimiter(settings.rate_limit, settings.redis_url), KeyUses(database)
    return Service(
        settings=settings,
        database=database,
        doorbell=Doorbell(settings.redis_url),
        gate=Gate(settings, database, limiter, key_uses),
        limiter=limiter,
        device_limiter=RateLimiter(settings.device_rate_limit, settings.redis_url),
        feeds=Feeds(database),
        key_uses=key_uses,
        deliveries=Deliveries(database, settings.webhook_allowed_hosts),
        metrics=Metrics(database, settings.lease_s),
        tracing=tracing("api", __version__, os.environ),
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    async with AsyncExitStack() as running:
        await running.enter_async_context(service.key_uses.writing())
        await running.enter_async_context(service.deliveries.running())
        if app.state.mcp is not None:
            await running.enter_async_context(app.state.mcp.running())
        if service.settings.embedded and service.settings.embedded_worker:
            await running.enter_async_context(embedded_worker(service.settings))
        yield
    service.doorbell.close()
    service.tracing.close()
    service.database.close()
