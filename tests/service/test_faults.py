"""Faults of workers as separate processes: killed, asked to stop, cut off; messages that are lost or come twice."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import psutil
import psycopg
import pytest
import redis
from sqlalchemy import make_url

from api.service import Doorbell
from optigpu.documents.views import JobView
from optigpu.store import results, workers
from optigpu.store.database import Database, default_url
from optigpu.store.workers import LOOK_TASK, broker_url, message, queue_for, repeated
from optigpu.vocabulary import DeviceKind, JobState, new_id
from tests.servers.databases import fresh_database
from tests.service.processes import Processes, eventually, stop, watched_processes
from tests.service.receiver import gate_to
from tests.service.serving import ENDLESS, look, matmul, measuring_processes, migrated, submit

pytestmark = pytest.mark.slow

SLOW = {"replicates": 1, "min_seconds": 2.0, "max_seconds": 2.0, "meters": ("latency",)}
"""Long enough for something to happen to it, short enough to wait for its end."""
LEASE_S = 4
LONGER_THAN_THE_LEASE = SLOW | {"min_seconds": LEASE_S, "max_seconds": LEASE_S}
QUEUE = queue_for(DeviceKind.CPU)
CPU = DeviceKind.CPU


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with migrated(default_url(tmp_path)) as database:
        yield database


@pytest.fixture
def postgres(postgres_server_url: str) -> Iterator[str]:
    """A migrated PostgreSQL database."""
    with fresh_database(postgres_server_url) as url, migrated(url):
        yield url


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Workers that notice everything soon, on a SQLite file; none of their processes may be left at the end."""
    variables = {
        "OPTIGPU_DATA_DIR": str(tmp_path),
        "OPTIGPU_LEASE_S": str(LEASE_S),
        "OPTIGPU_POLL_S": "0.2",
        "OPTIGPU_SWEEP_S": "0.5",
    }
    with watched_processes(tmp_path, variables) as processes:
        yield processes


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as broker:
        broker.delete(QUEUE)
        yield broker
        broker.delete(QUEUE)


def child_of(worker: subprocess.Popen[bytes]) -> psutil.Process:
    (child,) = eventually(lambda: measuring_processes(psutil.Process(worker.pid)))
    return child


def ended(database: Database, job_id: str) -> JobView:
    assert eventually(lambda: look(database, job_id).state.is_final)
    return look(database, job_id)


def outcomes(job: JobView) -> list[str | None]:
    return [attempt.outcome for attempt in job.attempts]


def stored_once(database: Database, job: JobView) -> bool:
    with database.read() as session:
        documents = results.of_job(session, job.id)
    return [document["id"] for document in documents] == [variant.result_id for variant in job.variants]


def test_a_killed_worker_leaves_no_process_and_its_job_to_the_next(
    database: Database, processes: Processes
) -> None:
    job_id = submit(database, matmul(measure=SLOW))
    first = processes.start("worker", "--device", "cpu")
    child = child_of(first)
    first.kill()
    child.wait(timeout=15)
    second = processes.start("worker", "--device", "cpu")
    job = ended(database, job_id)
    stop(second)
    assert (job.state, outcomes(job)) == (JobState.SUCCEEDED, ["lost", "succeeded"])
    assert stored_once(database, job)


@pytest.mark.parametrize(("mode", "number"), [("embedded", signal.SIGTERM), ("service", signal.SIGINT)])
def test_a_worker_that_is_told_to_end_hands_its_job_back_and_signs_off(
    database: Database, processes: Processes, redis_url: str, mode: str, number: signal.Signals
) -> None:
    job_id = submit(database, matmul(measure=ENDLESS))
    variables = {"OPTIGPU_REDIS_URL": redis_url} if mode == "service" else {}
    worker = processes.start("worker", "--device", "cpu", **variables)
    child = child_of(worker)
    with database.read() as session:
        assert [view.device for view in workers.list_(session)] == [DeviceKind.CPU]
    worker.send_signal(number)
    assert worker.wait(15) == 0
    assert not child.is_running()
    job = look(database, job_id)
    assert (job.state, outcomes(job)) == (JobState.QUEUED, ["released"])
    with database.read() as session:
        assert workers.list_(session) == []


@pytest.mark.long
def test_a_run_survives_connections_that_the_database_ends(postgres: str, processes: Processes) -> None:
    with migrated(postgres) as database:
        job_id = submit(database, matmul(measure=SLOW))
        worker = processes.start("worker", "--device", "cpu", OPTIGPU_DATABASE_URL=postgres)
        child_of(worker)
        for _ in range(3):
            end_connections(postgres)
            time.sleep(0.7)
        job = ended(database, job_id)
        stop(worker)
        assert (job.state, outcomes(job)) == (JobState.SUCCEEDED, ["succeeded"])
        assert stored_once(database, job)


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "lease_s", "attempts"),
    [({}, 60, ["succeeded"]), ({"measure": LONGER_THAN_THE_LEASE}, LEASE_S, ["database_away", "succeeded"])],
    ids=["shorter than the lease", "longer"],
)
def test_a_run_ends_only_when_the_database_is_away_for_longer_than_the_lease(
    postgres: str, processes: Processes, asked: dict[str, Any], lease_s: int, attempts: list[str]
) -> None:
    """It is away while the measurement ends."""
    with migrated(postgres) as database, gate_to(postgres, 5432) as gate:
        gate.open()
        job_id = submit(database, matmul(**asked))
        variables = {"OPTIGPU_DATABASE_URL": gate.url, "OPTIGPU_LEASE_S": str(lease_s)}
        worker = processes.start("worker", "--device", "cpu", **variables)
        child = child_of(worker)
        gate.shut()
        child.wait(timeout=60)
        gate.open()
        job = ended(database, job_id)
        stop(worker)
        assert (job.state, outcomes(job)) == (JobState.SUCCEEDED, attempts)
        assert stored_once(database, job)


@pytest.mark.long
def test_a_worker_waits_for_a_broker_that_is_away_and_a_ring_that_was_lost_is_rung_again(
    database: Database, processes: Processes, redis_url: str, broker: redis.Redis
) -> None:
    """No message announces these jobs, and the broker's data is deleted between them."""
    with gate_to(redis_url, 6379) as gate:
        worker = processes.start("worker", "--device", "cpu", OPTIGPU_REDIS_URL=gate.url)
        first = submit(database, matmul())
        assert eventually(lambda: "broker.away" in processes.printed())
        assert look(database, first).state is JobState.QUEUED
        gate.open()
        assert ended(database, first).state is JobState.SUCCEEDED
        broker.delete(QUEUE, f"_kombu.binding.{QUEUE}")
        second = submit(database, matmul())
        assert ended(database, second).state is JobState.SUCCEEDED
        gate.shut()
        stop(worker)


def end_connections(url: str) -> None:
    """What a restart of the server does to its clients."""
    with psycopg.connect(
        make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    ) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.fixture
def on_postgresql(postgres_server_url: str) -> Iterator[Database]:
    with fresh_database(postgres_server_url) as url, migrated(url) as on_postgresql:
        yield on_postgresql


@pytest.fixture
def beside_servers(tmp_path: Path, on_postgresql: Database, redis_url: str) -> Iterator[Processes]:
    variables = {
        "OPTIGPU_DATABASE_URL": on_postgresql._engine.url.render_as_string(hide_password=False),
        "OPTIGPU_REDIS_URL": redis_url,
        "OPTIGPU_DATA_DIR": str(tmp_path),
        "OPTIGPU_SWEEP_S": "0.5",
    }
    with watched_processes(tmp_path, variables) as beside_servers:
        yield beside_servers


@pytest.fixture
def app(redis_url: str) -> Iterator[celery.Celery]:
    """Any Celery program, as Flower is one."""
    app = celery.Celery("tools", broker=broker_url(redis_url), set_as_current=False)
    yield app
    app.close()


def ids(broker: redis.Redis) -> list[str]:
    """The tasks' ids of the messages that wait, in the order in which they came."""
    return [json.loads(each)["headers"]["id"] for each in reversed(broker.lrange(QUEUE, 0, -1))]


@pytest.mark.long
def test_celery_shows_what_waits_and_what_runs(
    beside_servers: Processes, on_postgresql: Database, broker: redis.Redis, app: celery.Celery
) -> None:
    first, second = (submit(on_postgresql, matmul(measure=ENDLESS)) for _ in range(2))
    for job_id in (first, second):
        app.send_task(**message(job_id, CPU))
    assert ids(broker) == [first, second]
    worker = beside_servers.start("worker", "--device", "cpu")
    inspect = app.control.inspect(timeout=2)
    (active,) = eventually(lambda: [each for each in (inspect.active() or {}).values() if each])
    assert [(task["name"], task["id"], task["args"]) for task in active] == [(LOOK_TASK, first, [first])]
    assert ids(broker) == [second]
    assert list((inspect.reserved() or {}).values()) == [[]]
    assert look(on_postgresql, first).state is JobState.RUNNING
    stop(worker)
    assert [look(on_postgresql, job_id).state for job_id in (first, second)] == [JobState.QUEUED] * 2


@pytest.mark.long
def test_lost_repeated_and_senseless_messages_change_nothing(
    beside_servers: Processes, on_postgresql: Database, broker: redis.Redis, app: celery.Celery
) -> None:
    told, lost = submit(on_postgresql, matmul()), submit(on_postgresql, matmul())
    for each in (message(told, CPU), message(told, CPU), repeated(told, CPU), message(new_id(), CPU)):
        app.send_task(**each)
    worker = beside_servers.start("worker", "--device", "cpu")
    both = (told, lost)
    assert eventually(lambda: all(look(on_postgresql, job_id).state.is_final for job_id in both), 90)
    assert eventually(lambda: ids(broker) == [])
    stop(worker)
    assert [[attempt.outcome for attempt in look(on_postgresql, job_id).attempts] for job_id in both] == [
        ["succeeded"]
    ] * 2


def test_the_api_sends_a_batch_in_its_order_and_drops_it_while_the_broker_is_away(
    redis_url: str, broker: redis.Redis
) -> None:
    doorbell, away = Doorbell(redis_url), Doorbell("redis://127.0.0.1:1/0")
    posted = [new_id() for _ in range(50)]
    for job_id in posted:
        away.ring(job_id, CPU)
        doorbell.ring(job_id, CPU)
    doorbell.close()
    away.close()
    assert ids(broker) == posted
