"""`python -m worker [--device cpu|cuda] [--gpu UUID]`: runs jobs until it receives SIGINT or SIGTERM.

Without OPTIGPU_REDIS_URL it polls the database; with it, it is a Celery worker. Its device proves that it works before
it takes jobs. Exit status 2 means that the worker could not start, 1 that its device stopped working; the reason is
printed on stderr. Logs on stderr are for a person where it polls, and JSON lines for a collector where it does not.

`python -m worker --launch slurm` hands jobs to a cluster's scheduler; `--once --job ID` is the pilot that it starts
there: it measures that job and ends.
"""

import argparse
import logging
import os
import signal
import sys
from contextlib import closing
from typing import TypeVar

import stamina
import structlog
from pydantic import ValidationError
from pydantic_settings import BaseSettings
from structlog.typing import Processor

import migrations
from optigpu import __version__
from optigpu.documents.fields import describe_settings
from optigpu.hardware.gpu import Driver
from optigpu.paths import lock_dir
from optigpu.store import workers
from optigpu.store.database import Database, Session, StoreUnavailableError
from optigpu.tracing import tracing
from optigpu.variables import unknown_variables
from optigpu.vocabulary import SCHEDULERS, DeviceKind, OptiGPUError, Scheduler, StoreError, UnsupportedError
from worker import heartbeat
from worker.capabilities import serving
from worker.context import LauncherSettings, PilotSettings, WorkerContext, WorkerSettings, retrying
from worker.execute import execute_next
from worker.sweeper import Sweeper

Settings = TypeVar("Settings", bound=BaseSettings)
CANNOT_START, DEVICE_LOST, INTERRUPTED = 2, 1, 130

log = structlog.stdlib.get_logger("worker")
_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def main() -> int:
    """Runs the worker; returns the process's exit status."""
    try:
        options = _options()
        if options.once:
            return _pilot(options)
        if options.launch:
            return _launch(options)
        settings = _settings(WorkerSettings)
        configure_logs(settings.log_level, as_json=settings.redis_url is not None)
        _warn_of_unknown_variables()
        if settings.heartbeat_file:
            heartbeat.renew(settings.heartbeat_file, 0)  # it can be written; the worker is not alive yet
        _require_tables(settings.database_url)
        lost = _run(options, settings)
    except OptiGPUError as error:
        return _ended(CANNOT_START, str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0 if lost is None else _ended(DEVICE_LOST, lost)


def _run(options: argparse.Namespace, settings: WorkerSettings) -> str | None:
    """Works until asked to stop, or until the device no longer works: then the reason is returned."""
    if options.gpu:
        show_only(options.gpu)
    with (
        serving(options.device, lock_dir()) as info,
        closing(Database(settings.database_url)) as database,
        closing(tracing("worker", __version__, os.environ)) as traces,
    ):
        context = WorkerContext(info=info, database=database, settings=settings, tracing=traces)
        context.prove_device()
        _work(context)
        return context.lost


def _pilot(options: argparse.Namespace) -> int:
    from worker import pilot  # the other workers need none of what clusters need

    settings = _settings(PilotSettings)
    configure_logs(settings.log_level, as_json=False)
    if options.gpu:
        show_only(options.gpu)
    with closing(tracing("worker", __version__, os.environ)) as traces:
        pilot.run_once(options.job, options.device, settings, traces)
    return 0


def _launch(options: argparse.Namespace) -> int:
    from optigpu.clusters import options_of
    from worker.launch import LaunchLoop
    from worker.launchers import LAUNCHERS
    from worker.pilot import confidential

    settings = _settings(LauncherSettings)
    confidential(settings.url)
    options_of(settings.launch_options or "")
    configure_logs(settings.log_level, as_json=False)
    _warn_of_unknown_variables()
    _require_tables(settings.database_url)
    with closing(Database(settings.database_url)) as database:
        LaunchLoop(options.launch, LAUNCHERS[options.launch](), database, settings).serve()
    return 0


def _ended(status: int, why: str) -> int:
    print(f"python -m worker: {why}", file=sys.stderr)
    return status


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m worker", description="Runs jobs until it receives SIGINT or SIGTERM."
    )
    which = "the device to measure on; by default a GPU if there is one, else the CPU"
    parser.add_argument("--device", type=DeviceKind, choices=list(DeviceKind), help=which)
    one = "the GPU or MIG slice to measure on, by its UUID of `nvidia-smi -L`; by default the first that is free"
    parser.add_argument("--gpu", metavar="UUID", help=one)
    whole = "measure one job in a scheduler's allocation and end; a launcher starts it so"
    parser.add_argument("--once", action="store_true", help=whole)
    parser.add_argument("--job", metavar="ID", help="the job of --once")
    hands = "hand jobs to this scheduler instead of running them"
    parser.add_argument("--launch", type=Scheduler, choices=SCHEDULERS, help=hands)
    options = parser.parse_args()
    if options.once != bool(options.job):
        parser.error("--once and --job belong together: --once --job ID")
    if options.launch and (options.once or options.device or options.gpu):
        parser.error("--launch runs no job itself; leave the other options out")
    if options.gpu and options.device not in (None, DeviceKind.CUDA):
        parser.error(f"--gpu names an NVIDIA GPU and --device says {options.device}; leave one of them out")
    return options


def _warn_of_unknown_variables() -> None:
    for sentence in unknown_variables(os.environ):
        log.warning("unknown_setting", reason=sentence)


def _settings(kind: type[Settings]) -> Settings:
    try:
        return kind()
    except ValidationError as error:
        raise OptiGPUError(describe_settings(error, "OPTIGPU_")) from None


def _require_tables(url: str) -> None:
    """Waits for a database that is away. Raises StoreError if its tables are not those of this version."""

    def lacking() -> str | None:  # without arguments: the log of a retry would show the URL with its password
        return migrations.lacking(url)

    if why := stamina.RetryingCaller(attempts=None, timeout=None)(StoreUnavailableError, lacking):
        raise StoreError(why)


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
        poll(context)
    else:
        from worker import app  # Celery is loaded only where there is a broker

        app.serve(context, context.settings.redis_url)


def _sign_off(context: WorkerContext) -> None:
    try:
        context.write(lambda session: workers.leave(session, context.info.id))
    except StoreUnavailableError as error:
        log.warning("database.away", reason=str(error))
    if context.settings.heartbeat_file:
        context.settings.heartbeat_file.unlink(missing_ok=True)
    log.info("worker.stopped", worker_id=context.info.id)


def poll(context: WorkerContext) -> None:
    """Looks for a job every `poll_s` seconds until the process is asked to stop."""

    def stop(*_: object) -> None:
        context.stopping.ask()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with Sweeper(context):
        while not context.stopping.asked:
            if not execute_next(context):
                context.stopping.wait(context.settings.poll_s)


def show_only(uuid: str) -> None:
    """Hides every GPU and MIG slice but one from this process and its children.

    `uuid` is its UUID as `nvidia-smi -L` lists it, or the beginning of it. Raises UnsupportedError if it names no GPU
    or several, SensorError if the driver cannot be asked.
    """
    with Driver() as driver:
        names = {gpu.uuid(): gpu.name() for gpu in driver.gpus()}
    found = [each for each in names if each.startswith(uuid)]
    listed = ", ".join(f"{each} ({name})" for each, name in names.items())
    if not found:
        raise UnsupportedError(f"This machine has no GPU {uuid}; it has: {listed or 'none'}.")
    if len(found) > 1:
        raise UnsupportedError(f"Several GPUs begin with {uuid}: {listed}; write the whole UUID.")
    os.environ["CUDA_VISIBLE_DEVICES"] = found[0]


def configure_logs(level: str, *, as_json: bool) -> None:
    """One format for our logs and those of the libraries, of which only warnings and errors are shown."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_SHARED, processors=_ending(as_json=as_json))
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for ours in ("worker", "optigpu"):
        logging.getLogger(ours).setLevel(level)


def _ending(*, as_json: bool) -> list[Processor]:
    clean = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if as_json:
        return [clean, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    plain = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    return [clean, plain]


if __name__ == "__main__":
    sys.exit(main())
