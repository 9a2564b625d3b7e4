"""Creates the FastAPI application from the settings. An embedded service has its worker as a child process, which is
started again when it ends, and ends with the service."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import structlog
from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Route

from api import pages, problems
from api.deliveries import Deliveries
from api.gate import Gate, KeyUses, RateLimiter
from api.inputs import refuse_unknown_parameters
from api.metrics import Metrics
from api.middleware import HostGuard, KeptPages, RequestContext
from api.openapi import DocumentedApp
from api.routes import ROUTERS
from api.service import Doorbell, Feeds, Service
from api.settings import ServiceSettings
from optigpu import __version__
from optigpu.store.database import Database
from optigpu.tracing import tracing

if TYPE_CHECKING:
    from api.mcp import Endpoint

GRACE_S = 10.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
HEALTHY_AFTER_S = 60.0
STDERR = 2
_PR_SET_PDEATHSIG = 1
logger = structlog.stdlib.get_logger("api.app")


@asynccontextmanager
async def embedded_worker(settings: ServiceSettings) -> AsyncIterator[None]:
    """Runs `python -m worker` as long as the block lasts; at its end nothing of it is left.

    Enter it on the main thread: Linux ends the child when the *thread* that made it ends.
    """
    environment = {**os.environ, "OPTIGPU_DATABASE_URL": settings.database_url}
    task = asyncio.create_task(_supervise(environment))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _supervise(environment: Mapping[str, str]) -> None:
    pause_s = FIRST_PAUSE_S
    while True:
        begun = time.monotonic()
        code = await _run_once(environment)
        if time.monotonic() - begun > HEALTHY_AFTER_S:
            pause_s = FIRST_PAUSE_S
        logger.error("worker_ended", exit_code=code, starts_again_in_s=pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _run_once(environment: Mapping[str, str]) -> int:
    """Its standard output goes where our log goes: ours is for the line that says where we listen."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "worker",
        env=environment,
        stdin=DEVNULL,
        stdout=STDERR,
        start_new_session=True,
        preexec_fn=_ends_with(os.getpid()),
    )
    logger.info("worker_started", pid=process.pid)
    try:
        return await process.wait()
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    """Asks it to stop, and kills its process group after GRACE_S."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _ends_with(parent: int) -> Callable[[], None] | None:
    """Runs in the child before the worker starts: asks Linux to send SIGTERM when the parent dies, for any reason."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


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
    for router in (*ROUTERS, pages.router):
        app.include_router(router)
    app.state.mcp = _mcp_endpoint(app, service)
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


def _mcp_endpoint(app: FastAPI, service: Service) -> "Endpoint | None":
    """Adds the endpoint for programs that talk, unless the settings say no or the extra mcp is missing."""
    if not service.settings.mcp or find_spec("mcp") is None:
        return None
    from api.mcp import PATH, Endpoint

    endpoint = Endpoint(service)
    app.router.routes.append(Route(PATH, endpoint, include_in_schema=False))
    return endpoint


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
