"""Logs on stderr: readable for a person (embedded), JSON lines for a collector (service)."""

import logging
import sys

import structlog
from structlog.typing import Processor

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
