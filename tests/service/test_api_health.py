"""Liveness, readiness, figures, the page, and a broker that is away."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

import migrations
from optigpu.store import workers
from optigpu.store.doorbell import queue_for
from optigpu.vocabulary import DeviceKind
from tests.servers.process import free_port
from tests.service.pages import Page
from tests.service.records import a_metric, a_result, a_worker
from tests.service.serving import MATMUL, Served, serving

KEY = "a-first-key-that-is-long-enough"


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


def test_a_database_of_another_version_is_told_from_an_empty_one(database_url: str) -> None:
    with serving(database_url) as served:
        with served.database.write() as session:
            session.execute(text("UPDATE alembic_version SET version_num = 'another'"))
        (entry,) = served.client.get("/readyz").json()["errors"]
        assert entry["message"].startswith("The database's tables are not those of this version;")


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


def test_a_folder_that_is_gone_is_said_beside_the_database(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    with serving(f"sqlite:///{folder / 'optigpu.db'}") as served:
        served.app.state.service.database.close()
        shutil.rmtree(folder)
        errors = served.client.get("/readyz").json()["errors"]
        assert not folder.exists(), "a question does not make it again"
    assert errors == [
        {"field": "database", "message": "The database does not answer."},
        {"field": "folder", "message": "The data folder cannot be written."},
    ]


def test_a_database_that_is_away_is_a_problem_that_hides_its_address(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    with serving(f"sqlite:///{folder / 'optigpu.db'}") as served:
        served.app.state.service.database.close()
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        answers = [served.client.get(path) for path in ("/v1/jobs", "/readyz", "/metrics", "/")]
        posted = served.client.post("/v1/jobs", json=MATMUL)
    for answer in (*answers, posted):
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert str(folder) not in answer.text


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_the_database_is_read_once_for_scrapes_that_follow_closely(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.metrics.KEPT_S", 0.0)
    cpu = (("device", "cpu"),)
    before = scrape(service)["optigpu_queue_depth", cpu]
    service.submit()
    monkeypatch.setattr("api.metrics.KEPT_S", 1e9)
    assert scrape(service)["optigpu_queue_depth", cpu] == before
    monkeypatch.setattr("api.metrics.KEPT_S", 0.0)
    assert scrape(service)["optigpu_queue_depth", cpu] == before + 1


def test_the_pages_show_results_and_jobs_escaped_and_load_nothing_from_elsewhere(service: Served) -> None:
    job_id = service.submit()["id"]
    hostile = "<script>alert(1)</script>"
    result = a_result({"tflops": a_metric("tflops", 1.25)}, workload="matmul", hardware=hostile)
    service.finish(service.claim(), result)
    board, jobs = (service.client.get(path) for path in ("/", "/jobs"))
    assert board.headers["content-type"].startswith("text/html")
    assert board.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert job_id in jobs.text
    assert "1.25" in board.text
    assert "&lt;script&gt;" in board.text
    assert [Page(page.text).from_elsewhere for page in (board, jobs)] == [[], []]


def test_the_page_says_why_a_job_ended_so(service: Served) -> None:
    service.submit()
    result = a_result(workload="matmul", valid=False)
    service.finish(
        service.claim(), result, reason="Nothing that was measured can be ranked: output_invalid (1 of 1)."
    )
    assert (
        "Nothing that was measured can be ranked: output_invalid (1 of 1)."
        in service.client.get("/jobs").text
    )


def test_the_page_says_when_there_is_nothing_yet(service: Served) -> None:
    assert "There are no results yet." in service.client.get("/").text
    assert "There are no jobs yet." in service.client.get("/jobs").text
