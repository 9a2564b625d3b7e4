"""The worker of the embedded service: a child process that is started again when it ends, and ends with us."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import structlog

from api.settings import ServiceSettings

GRACE_S = 10.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
HEALTHY_AFTER_S = 60.0
STDERR = 2
_PR_SET_PDEATHSIG = 1
logger = structlog.stdlib.get_logger("api.embedded")


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
