"""`python -m worker [--device cpu|cuda]`: runs jobs until it receives SIGINT or SIGTERM.

Without OPTIGPU_REDIS_URL it polls the database; with it, it is a Celery worker. Exit status 2 means that it could not
start; the reason is printed on stderr.
"""

import argparse
import sys
from contextlib import closing

import stamina
import structlog
from pydantic import ValidationError

import migrations
from optigpu.paths import lock_dir
from optigpu.store import workers
from optigpu.store.database import Database, Session
from optigpu.store.errors import StoreUnavailableError
from optigpu.vocabulary import DeviceKind, OptiGPUError, StoreError
from worker import logs, poll
from worker.capabilities import serving
from worker.context import WorkerContext, retrying
from worker.settings import WorkerSettings

CANNOT_START = 2

log = structlog.stdlib.get_logger("worker")


def main() -> int:
    """Runs the worker; returns the process's exit status."""
    try:
        wanted, settings = _wanted_device(), _settings()
        logs.configure(settings.log_level, as_json=settings.redis_url is not None)
        _require_tables(settings.database_url)
        with serving(wanted, lock_dir()) as info, closing(Database(settings.database_url)) as database:
            _work(WorkerContext(info=info, database=database, settings=settings))
    except OptiGPUError as error:
        print(f"python -m worker: {error}", file=sys.stderr)
        return CANNOT_START
    return 0


def _wanted_device() -> DeviceKind | None:
    parser = argparse.ArgumentParser(
        prog="python -m worker", description="Runs jobs until it receives SIGINT or SIGTERM."
    )
    which = "the device to measure on; by default a GPU if there is one, else the CPU"
    parser.add_argument("--device", type=DeviceKind, choices=list(DeviceKind), help=which)
    device: DeviceKind | None = parser.parse_args().device
    return device


def _settings() -> WorkerSettings:
    try:
        return WorkerSettings()
    except ValidationError as error:
        wrong = (f"OPTIGPU_{item['loc'][0]}".upper() + f": {item['msg']}" for item in error.errors())
        raise OptiGPUError("; ".join(wrong)) from None


def _require_tables(url: str) -> None:
    """Waits for a database that is away. Raises StoreError if its tables are not those of this version."""

    def current() -> bool:  # without arguments: the log of a retry would show the URL with its password
        return migrations.is_current(url)

    if not stamina.RetryingCaller(attempts=None, timeout=None)(StoreUnavailableError, current):
        raise StoreError(
            "The database's tables are not those of this version; run `alembic upgrade head` on it."
        )


def _work(context: WorkerContext) -> None:
    def register(session: Session) -> None:
        workers.register(session, context.info)

    retrying(lambda: context.write(register), lambda: True)
    log.info("worker.started", worker_id=context.info.id, device=context.info.device, gpus=context.info.gpus)
    try:
        _serve(context)
    finally:
        _sign_off(context)


def _serve(context: WorkerContext) -> None:
    if context.settings.redis_url is None:
        poll.serve(context)
    else:
        from worker import app  # Celery is loaded only where there is a broker

        app.serve(context, context.settings.redis_url)


def _sign_off(context: WorkerContext) -> None:
    try:
        context.write(lambda session: workers.leave(session, context.info.id))
    except StoreUnavailableError as error:
        log.warning("database.away", reason=str(error))
    log.info("worker.stopped", worker_id=context.info.id)


if __name__ == "__main__":
    sys.exit(main())
