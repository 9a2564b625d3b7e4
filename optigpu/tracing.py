"""Traces for OpenTelemetry, recorded where OTEL_EXPORTER_OTLP_ENDPOINT names a collector.

They need the extra `otel`. Without the variable this module imports nothing of OpenTelemetry, and no span is recorded.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as Recorded

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SERVICE_NAME = "OTEL_SERVICE_NAME"
_log = logging.getLogger(__name__)

Value = str | bool | int | float


class SpanKind(StrEnum):
    """What a span stands for: a request that was served, a job that was taken from the queue, or a part of one."""

    SERVER = "SERVER"
    CONSUMER = "CONSUMER"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True)
class Span:
    """A piece of work. Without `recorded` every method does nothing."""

    recorded: "Recorded | None" = None

    @property
    def address(self) -> str | None:
        """What the header `traceparent` of W3C Trace Context says of it; None if it is not recorded."""
        if self.recorded is None:
            return None
        context = self.recorded.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def rename(self, name: str) -> None:
        """Gives it a name that was not known at its start."""
        if self.recorded is not None:
            self.recorded.update_name(name)

    def note(self, values: Mapping[str, Value]) -> None:
        """Adds attributes."""
        if self.recorded is not None:
            self.recorded.set_attributes(dict(values))

    def fail(self, reason: str) -> None:
        """Marks it as failed."""
        if self.recorded is not None:
            from opentelemetry.trace import Status, StatusCode

            self.recorded.set_status(Status(StatusCode.ERROR, reason))

    def end(self) -> None:
        """Ends it now."""
        if self.recorded is not None:
            self.recorded.end()


@dataclass(frozen=True)
class Tracing:
    """The spans of one program. Without `provider` none is recorded."""

    provider: "TracerProvider | None" = None

    def start(self, name: str, kind: SpanKind, parent: str | None, values: Mapping[str, Value]) -> Span:
        """A span that begins now; `parent` is the address of the one that it belongs to."""
        if self.provider is None:
            return Span()
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if parent is None else {"traceparent": parent}
        context = TraceContextTextMapPropagator().extract(carrier, Context())
        tracer = self.provider.get_tracer("optigpu")
        return Span(
            tracer.start_span(name, context, kind=trace.SpanKind[kind.value], attributes=dict(values))
        )

    @contextmanager
    def span(self, name: str, kind: SpanKind, parent: str | None = None) -> Iterator[Span]:
        """A span that lasts as long as the block."""
        span = self.start(name, kind, parent, {})
        try:
            yield span
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Sends what is not sent yet; waits a few seconds for a collector that is away."""
        if self.provider is not None:
            self.provider.shutdown()


def tracing(program: str, version: str, environment: Mapping[str, str]) -> Tracing:
    """The tracing that the environment asks for; a missing extra is logged, and spans are then not recorded.

    The service's name is `optigpu-PROGRAM`, unless OTEL_SERVICE_NAME says otherwise. OpenTelemetry reads its other
    variables by itself.
    """
    endpoint = next((name for name in ENDPOINTS if environment.get(name)), None)
    if endpoint is None:
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        _log.warning(
            "%s is set, but %s is missing: no trace is recorded. Install it with: pip install 'optigpu[otel]'.",
            endpoint,
            error.name,
        )
        return Tracing()
    name = environment.get(SERVICE_NAME) or f"optigpu-{program}"
    resource = Resource.create({"service.name": name, "service.version": version})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
