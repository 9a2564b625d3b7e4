"""Creates the FastAPI application from the settings."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import Depends, FastAPI
from starlette.middleware.gzip import GZipMiddleware

from api import problems
from api.doorbell import Doorbell
from api.embedded import embedded_worker
from api.feeds import Feeds
from api.key_uses import KeyUses
from api.limits import RateLimiter
from api.metrics import Metrics
from api.middleware import HostGuard, RequestContext
from api.openapi import DocumentedApp
from api.parameters import refuse_unknown_parameters
from api.routes import (
    compare,
    devices,
    docs,
    edge_models,
    events,
    hardware,
    health,
    imports,
    jobs,
    leaderboard,
    pages,
    results,
    schema,
    workers,
)
from api.service import Service
from api.settings import ServiceSettings
from optigpu.store.database import Database

ROUTERS = (
    jobs,
    imports,
    events,
    results,
    compare,
    leaderboard,
    devices,
    edge_models,
    workers,
    hardware,
    schema,
    health,
    pages,
    docs,
)
COMPRESSED_FROM_BYTES = 1000
COMPRESSION_LEVEL = 5


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
    # The last one added is the outermost.
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESSED_FROM_BYTES, compresslevel=COMPRESSION_LEVEL)
    if settings.on_loopback:
        app.add_middleware(HostGuard, allowed=settings.allowed_hosts)
    app.add_middleware(RequestContext, metrics=service.metrics, prefix=settings.prefix)
    return app


def _service(settings: ServiceSettings) -> Service:
    database = Database(settings.database_url)
    return Service(
        settings=settings,
        database=database,
        doorbell=Doorbell(settings.redis_url),
        limiter=RateLimiter(settings.rate_limit, settings.redis_url),
        device_limiter=RateLimiter(settings.device_rate_limit, settings.redis_url),
        feeds=Feeds(database),
        key_uses=KeyUses(database),
        metrics=Metrics(database, settings.lease_s),
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    async with AsyncExitStack() as running:
        await running.enter_async_context(service.key_uses.writing())
        if service.settings.embedded and service.settings.embedded_worker:
            await running.enter_async_context(embedded_worker(service.settings))
        yield
    service.doorbell.close()
    service.database.close()
