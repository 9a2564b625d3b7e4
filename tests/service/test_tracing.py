"""Traces: one from the caller through the POST to the worker's attempt, as a collector receives them."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.events import Planned, VariantFinished, VariantStarted
from optigpu.store import events, leases
from optigpu.tracing import Tracing, tracing
from optigpu.vocabulary import JobState
from tests.service.records import a_failure, a_plan
from tests.service.serving import MATMUL, serving
from tests.service.workers import worker_context
from worker.heartbeat import Heartbeat
from worker.held import StoredJob
from worker.recorder import Recorder
from worker.trace import AttemptTrace, parent_of

CALLER_TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector:
    """An OTLP receiver on a port of its own, and the spans that it was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        received = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in request.resource_spans:
                    received.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing: the test's output is for the test."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.mark.otel
def test_a_trace_goes_from_the_caller_through_the_post_to_the_attempt(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, collector.url)
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}") as served:
        job_id = served.submit(MATMUL, traceparent=f"00-{CALLER_TRACE}-{CALLER_SPAN}-01")["id"]
        context = worker_context(served.database)
        context.tracing = tracing("worker", "0", {ENDPOINT: collector.url})
        with served.database.write() as session:
            lease = leases.claim(session, context.info, 60)
        assert lease is not None
        job = StoredJob(context, lease)
        trace = AttemptTrace(context.tracing, lease, parent_of(context, lease.job_id))
        recorder = Recorder(job, Heartbeat(job, 60, time.monotonic()), context.stopping, trace)
        recorder(Planned(variants=a_plan("one")))
        recorder(VariantStarted(index=0))
        recorder(VariantFinished(outcome=a_failure()))
        recorder.finish(JobState.FAILED, "There was no memory left.")
        recorder.trace.end()
        context.tracing.close()
        with served.database.read() as session:
            told = [event.kind for event in events.after(session, job_id, 0)]
    spans = {span.name: span for span in collector.spans if span.trace_id.hex() == CALLER_TRACE}
    assert set(spans) == {"POST /v1/jobs", "attempt", "variant"}
    assert spans["POST /v1/jobs"].parent_span_id.hex() == CALLER_SPAN
    assert spans["attempt"].parent_span_id == spans["POST /v1/jobs"].span_id
    assert spans["variant"].parent_span_id == spans["attempt"].span_id
    values = {each.key: each.value for each in spans["attempt"].attributes}
    assert (values["job.id"].string_value, values["job.outcome"].string_value) == (job_id, "failed")
    assert spans["variant"].status.message == "There was no memory left."
    assert told[:3] == ["state", "traced", "state"]


def test_without_a_collector_nothing_is_recorded_and_no_event_is_added(tmp_path: Path) -> None:
    assert tracing("api", "0", {}) == Tracing()
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}") as served:
        job_id = served.submit(MATMUL)["id"]
        with served.database.read() as session:
            assert [event.kind for event in events.after(session, job_id, 0)] == ["state"]


def test_a_collector_without_the_extra_is_said_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        assert tracing("api", "0", {ENDPOINT: "http://127.0.0.1:4318"}) == Tracing()
    assert f"{ENDPOINT} is set, but " in caplog.text
    assert "pip install 'optigpu[otel]'" in caplog.text
