"""What an operator watches: liveness and readiness, figures, what is counted of jobs, and traces."""

import logging
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import delete, select

import migrations
from optigpu.documents.events import Planned, VariantFinished, VariantStarted
from optigpu.documents.result import Outcome
from optigpu.store import events, jobs, leases, outcomes, tallies, workers
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.store.tables import Attempt, Job, JobEvent, VariantRow
from optigpu.store.tallies import Phase, Tally, TallyReader
from optigpu.store.workers import queue_for
from optigpu.tracing import Tracing, tracing
from optigpu.vocabulary import DeviceKind, JobState, utc_now
from tests.servers.process import free_port
from tests.service.receiver import Receiver, receiving
from tests.service.records import a_failure, a_plan, a_result, a_spec, a_worker, an_outcome, claimed
from tests.service.serving import MATMUL, Served, serving, worker_context
from worker.heartbeat import Heartbeat, StoredJob
from worker.recorder import AttemptTrace, Recorder, parent_of

pytestmark = pytest.mark.slow

CPU = DeviceKind.CPU
CALLER_TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def silent_broker() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


def test_a_service_that_can_serve_says_so(service: Served) -> None:
    assert service.client.get("/healthz").json() == {"status": "alive"}
    assert service.client.get("/readyz").json() == {"status": "ready"}


def test_an_old_schema_is_not_ready_but_alive(database_url: str) -> None:
    with serving(database_url) as served:
        migrations.downgrade(database_url, "base")
        answer = served.client.get("/readyz")
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["errors"] == [
            {
                "field": "schema",
                "message": "The database has no tables yet; run `alembic upgrade head` on it.",
            }
        ]
        assert served.client.get("/healthz").status_code == 200
        assert served.client.get("/v1/jobs").status_code == 503


def test_a_disk_with_too_little_room_is_not_ready(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, min_free_bytes=1000 * free) as served:
        answer = served.client.get("/readyz")
        assert (answer.status_code, answer.json()["detail"]) == (503, "Not ready: disk.")
        (entry,) = answer.json()["errors"]
        assert f"fewer than the {1000 * free} of OPTIGPU_MIN_FREE_BYTES; free some space." in entry["message"]
        assert served.client.get("/healthz").status_code == 200
    with serving(url, min_free_bytes=0) as served:
        assert served.client.get("/readyz").status_code == 200


def test_a_database_that_is_away_is_a_problem_that_hides_its_address(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    with serving(f"sqlite:///{folder / 'optigpu.db'}") as served:
        served.app.state.service.database.close()
        shutil.rmtree(folder)
        errors = served.client.get("/readyz").json()["errors"]
        answers = [served.client.get(path) for path in ("/v1/jobs", "/readyz", "/metrics", "/")]
        answers.append(served.client.post("/v1/jobs", json=MATMUL))
        assert not folder.exists(), "a question does not make it again"
    assert errors == [
        {"field": "database", "message": "The database does not answer."},
        {"field": "folder", "message": "The data folder cannot be written."},
    ]
    for answer in answers:
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
        assert str(folder) not in answer.text


def test_the_broker_is_part_of_being_ready(tmp_path: Path, redis_url: str, silent_broker: str) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, redis_url=redis_url) as served:
        assert served.client.get("/readyz").status_code == 200
    for away in (silent_broker, f"redis://127.0.0.1:{free_port()}/0"):
        with serving(url, redis_url=away) as served:
            answer = served.client.get("/readyz")
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (503, "broker")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_new_job_rings_the_workers_of_its_device(tmp_path: Path, redis_url: str, device: str) -> None:
    queue = queue_for(DeviceKind(device))
    with redis.Redis.from_url(redis_url) as broker:
        broker.delete(queue)
        with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", redis_url=redis_url) as served:
            for _ in range(2):
                served.submit(MATMUL | {"device": device}, **{"Idempotency-Key": "one"})
        rings = broker.lrange(queue, 0, -1)
        broker.delete(queue)
    assert len(rings) == 1
    assert b"optigpu.look" in rings[0]


@pytest.mark.parametrize("away", ["silent", "refusing"])
def test_a_job_is_stored_while_the_broker_is_away(tmp_path: Path, silent_broker: str, away: str) -> None:
    broker = silent_broker if away == "silent" else f"redis://127.0.0.1:{free_port()}/0"
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", redis_url=broker) as served:
        served.client.timeout = 15
        for number in range(3):
            served.submit(MATMUL, **{"Idempotency-Key": str(number)})
        assert served.count_jobs() == 3


def scrape(service: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Each sample of /metrics, by its name and its labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(service.client.get("/metrics").text)
        for sample in family.samples
    }


def test_figures_of_jobs_workers_and_requests(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.metrics.KEPT_S", 0.0)
    service.submit()
    service.client.post(f"/v1/jobs/{service.submit()['id']}/cancel")
    with service.database.write() as session:
        workers.register(session, a_worker())
    service.client.request("TRACE", "/v1/jobs")
    service.client.get("/no/such/path")
    samples = scrape(service)
    jobs = {
        state: samples["optigpu_jobs", (("state", state),)] for state in ("queued", "cancelled", "running")
    }
    assert jobs == {"queued": 1, "cancelled": 1, "running": 0}
    cpu, cuda = ((("device", device),) for device in ("cpu", "cuda"))
    for name in ("optigpu_queue_depth", "optigpu_workers_alive"):
        assert (samples[name, cpu], samples[name, cuda]) == (1, 0)
    assert samples["optigpu_queue_oldest_seconds", cpu] > 0
    cancelled = ("method", "POST"), ("route", "/v1/jobs/{id}/cancel")
    assert samples["optigpu_http_requests_total", (*cancelled, ("status", "200"))] >= 1
    assert samples["optigpu_http_request_seconds_count", (*cancelled, ("status_class", "2xx"))] >= 1
    labels = {label for _, pairs in samples for label in pairs}
    assert {("route", "unmatched"), ("method", "other")} <= labels
    assert not [value for _, value in labels if value in ("/no/such/path", "TRACE")]


def tallied(database: Database, reader: TallyReader | None = None) -> Tally:
    with database.read() as session:
        return (reader or TallyReader()).read(session)


def begun(database: Database) -> Lease:
    with database.write() as session:
        jobs.submit(session, a_spec())
    with database.write() as session:
        return claimed(session)


def finished(database: Database, *ended: Outcome) -> str:
    """A job that has gone through all of its phases."""
    lease = begun(database)
    with database.write() as session:
        outcomes.plan(session, lease, a_plan(*("variant" for _ in ended)))
        for outcome in ended:
            outcomes.variant_started(session, lease, outcome.index)
            outcomes.save_outcome(session, lease, outcome)
        outcomes.finish(session, lease, JobState.SUCCEEDED)
    return lease.job_id


def test_attempts_variants_and_verdicts_are_counted(database: Database) -> None:
    finished(database, an_outcome(a_result()), an_outcome(a_result(valid=False, index=1)), a_failure(2))
    begun(database)
    with database.write() as session:
        leases.sweep(session, utc_now() + timedelta(hours=1))
    tally = tallied(database)
    assert tally.attempts == {(CPU, "succeeded"): 1, (CPU, "lost"): 1}
    assert tally.variants == {(CPU, "succeeded"): 2, (CPU, "failed"): 1}
    assert tally.verdicts == {(CPU, "valid"): 1, (CPU, "invalid"): 1}
    assert tally.reasons == {"output_invalid": 1}


def test_each_phase_is_measured_from_the_job_s_own_times(database: Database) -> None:
    at = utc_now()
    finished(database, an_outcome(a_result()))
    with database.write() as session:
        job, attempt = session.scalars(select(Job)).one(), session.scalars(select(Attempt)).one()
        started = session.scalars(select(JobEvent).where(JobEvent.kind == "variant_started")).one()
        job.created_at, attempt.started_at = at, at + timedelta(seconds=4)
        started.at, attempt.ended_at = at + timedelta(seconds=14), at + timedelta(seconds=104)
    tally = tallied(database)
    assert tally.phase_s == {(Phase.QUEUED, CPU): 4, (Phase.PREPARING, CPU): 10, (Phase.MEASURING, CPU): 90}
    bounds = {each.phase: tallies.BOUNDS_S[each.bucket] for each in tally.phases}
    assert bounds == {Phase.QUEUED: 5.0, Phase.PREPARING: 15.0, Phase.MEASURING: 300.0}
    assert tally.busy_s == {"worker-1": 100}


def test_what_is_settled_is_read_once_and_what_is_gone_stays_counted(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tallies, "COMMITTED_AFTER", timedelta(0))
    reader = TallyReader()
    finished(database, an_outcome(a_result()))
    first = tallied(database, reader)
    assert tallied(database, reader) == first == tallied(database)
    with database.write() as session:
        session.execute(delete(VariantRow))
        session.execute(delete(Job))
    assert tallied(database, reader) == first
    finished(database, an_outcome(a_result()))
    assert tallied(database, reader).attempts == {(CPU, "succeeded"): 2}


@pytest.fixture
def collector() -> Iterator[Receiver]:
    """An OTLP receiver on a port of its own."""
    with receiving() as receiver:
        yield receiver


def spans_of(collector: Receiver) -> list[Any]:
    """The spans that it was sent."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    requests = [ExportTraceServiceRequest.FromString(each.body) for each in collector.received]
    scopes = [scope for each in requests for sent in each.resource_spans for scope in sent.scope_spans]
    return [span for scope in scopes for span in scope.spans]


@pytest.mark.otel
def test_a_trace_goes_from_the_caller_through_the_post_to_the_attempt(
    tmp_path: Path, collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = collector.url().removesuffix("/hook")
    monkeypatch.setenv(ENDPOINT, address)
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}") as served:
        job_id = served.submit(MATMUL, traceparent=f"00-{CALLER_TRACE}-{CALLER_SPAN}-01")["id"]
        context = worker_context(served.database)
        context.tracing = tracing("worker", "0", {ENDPOINT: address})
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
    spans = {span.name: span for span in spans_of(collector) if span.trace_id.hex() == CALLER_TRACE}
    assert set(spans) == {"POST /v1/jobs", "attempt", "variant"}
    assert spans["POST /v1/jobs"].parent_span_id.hex() == CALLER_SPAN
    assert spans["attempt"].parent_span_id == spans["POST /v1/jobs"].span_id
    assert spans["variant"].parent_span_id == spans["attempt"].span_id
    values = {each.key: each.value for each in spans["attempt"].attributes}
    assert (values["job.id"].string_value, values["job.outcome"].string_value) == (job_id, "failed")
    assert spans["variant"].status.message == "There was no memory left."
    assert told[:3] == ["state", "traced", "state"]


def test_a_collector_without_the_extra_is_said_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        assert tracing("api", "0", {ENDPOINT: "http://127.0.0.1:4318"}) == Tracing()
    assert f"{ENDPOINT} is set, but " in caplog.text
    assert "pip install 'optigpu[otel]'" in caplog.text
