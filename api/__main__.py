"""python -m api: runs the service until it receives SIGINT or SIGTERM. `python -m api keys` and others: COMMANDS."""

import argparse
import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from types import FrameType

import structlog
import uvicorn
from structlog.typing import Processor

from api import commands
from api.app import create_app
from api.auth import has_key
from api.settings import ServiceSettings, SettingsError, read_settings
from optigpu.store.database import Database
from optigpu.variables import unknown_variables
from optigpu.vocabulary import StoreError

SELDOM = 1000
"""Collections of younger objects between two of all: Python's own 10 are a pause of 20 ms every few seconds."""
EXIT_REFUSED = 2
EXIT_FAILED = 1
COMMANDS = {
    "keys": commands.keys_command,
    "devices": commands.devices_command,
    "audit": commands.audit_command,
    "backup": commands.backup_command,
    "restore": commands.restore_command,
}
DRAIN_S = 5
logger = structlog.stdlib.get_logger("api.settings")


class Server(uvicorn.Server):
    """Prints where it listens, and treats a request to stop as success."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, then prints the address: the one line on standard output, which scripts wait for."""
        await super().startup(sockets)
        print(f"OptiGPU listens on {address_of(self.servers[0].sockets[0])}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops when open requests are answered, at a second signal at once. uvicorn's own raises the signal again."""
        self.force_exit = self.should_exit
        self.should_exit = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after a request to stop, 2 if the settings do not allow a start, 1 after an error."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in COMMANDS:
        return COMMANDS[given[0]](given[1:])
    try:
        settings = _settings(given)
        configure(settings.log_level, as_json=not settings.embedded)
        _warn_of_unknown_variables()
        _prepare(settings)
        listener = listen(settings)
    except (SettingsError, StoreError) as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED if isinstance(error, SettingsError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 0
    return _serve(settings, listener)


def _settings(arguments: Sequence[str]) -> ServiceSettings:
    parser = argparse.ArgumentParser(
        prog="python -m api",
        description="The OptiGPU service. Commands of their own: `python -m api keys`, `devices`, `audit`, `backup`, "
        "`restore`.",
    )
    parser.add_argument("--host", help="address to listen on (OPTIGPU_HOST; 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (OPTIGPU_PORT; 8000)")
    parser.add_argument(
        "--root-path",
        help="the path under which a reverse proxy serves it, /optigpu for example (OPTIGPU_ROOT_PATH)",
    )
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    return read_settings(**given)


def _warn_of_unknown_variables() -> None:
    for sentence in unknown_variables(os.environ):
        logger.warning("unknown_setting", reason=sentence)


def _prepare(settings: ServiceSettings) -> None:
    """Migrates the embedded database. Raises SettingsError if others can reach the service and there is no key."""
    if settings.embedded:
        import migrations

        migrations.upgrade(settings.database_url)
    if settings.on_loopback:
        return
    with closing(Database(settings.database_url)) as database:
        if not has_key(settings, database):
            raise SettingsError(
                f"Others can reach a service on {settings.host}, so it needs a key: set OPTIGPU_API_KEY, create one "
                "with `python -m api keys create NAME --scope submit`, or listen on 127.0.0.1."
            )


def listen(settings: ServiceSettings) -> socket.socket:
    """Returns a bound socket: an address that cannot be used is reported before anything else starts.

    An answer's body must not wait for the acknowledgement of its headers, which may take 40 ms; connections inherit
    that, and asyncio sets it only for sockets that it made itself.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise SettingsError(
            f"Cannot listen on {settings.host} port {settings.port} ({error.strerror}); choose another with --port."
        ) from None


def _serve(settings: ServiceSettings, listener: socket.socket) -> int:
    app = create_app(settings)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=DRAIN_S
    )
    server = Server(config)
    app.state.service.feeds.stopping = lambda: server.should_exit
    # What is loaded by now stays, and little that lives long is ever in a cycle: looking through all of it would delay
    # requests by a fifth of a second each time.
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(700, 10, SELDOM)
    try:
        server.run(sockets=[listener])
    finally:  # whoever called `main` goes on
        gc.set_threshold(*before)
        gc.unfreeze()
    return 0 if server.started else EXIT_FAILED


def address_of(listener: socket.socket) -> str:
    """The URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure(level: str, *, as_json: bool) -> None:
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
    logging.getLogger("api").setLevel(level)


def _ending(*, as_json: bool) -> list[Processor]:
    """Tracebacks are plain: pretty ones show the values of variables, and a key may be among them."""
    tidy = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if as_json:
        return [tidy, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [tidy, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]


if __name__ == "__main__":
    sys.exit(main())
