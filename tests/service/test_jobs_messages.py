"""A message for each job: what Celery's own tools show, and that lost and repeated messages change nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

import celery
import pytest
import redis

from api.doorbell import Doorbell
from optigpu.store.database import Database
from optigpu.store.doorbell import LOOK_TASK, broker_url, message, queue_for, repeated
from optigpu.vocabulary import DeviceKind, JobState, new_id
from tests.servers.postgres import fresh_database
from tests.service.processes import Processes, eventually, stop, watched_processes
from tests.service.workers import ENDLESS, look, matmul, migrated, submit

pytestmark = pytest.mark.slow

CPU = DeviceKind.CPU
QUEUE = queue_for(CPU)


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as broker:
        broker.delete(QUEUE)
        yield broker
        broker.delete(QUEUE)


@pytest.fixture
def database(postgres_server_url: str) -> Iterator[Database]:
    with fresh_database(postgres_server_url) as url, migrated(url) as database:
        yield database


@pytest.fixture
def processes(tmp_path: Path, database: Database, redis_url: str) -> Iterator[Processes]:
    variables = {
        "OPTIGPU_DATABASE_URL": database._engine.url.render_as_string(hide_password=False),
        "OPTIGPU_REDIS_URL": redis_url,
        "OPTIGPU_DATA_DIR": str(tmp_path),
        "OPTIGPU_SWEEP_S": "0.5",
    }
    with watched_processes(tmp_path, variables) as processes:
        yield processes


@pytest.fixture
def app(redis_url: str) -> Iterator[celery.Celery]:
    """Any Celery program, as Flower is one."""
    app = celery.Celery("tools", broker=broker_url(redis_url), set_as_current=False)
    yield app
    app.close()


def ids(broker: redis.Redis) -> list[str]:
    """The tasks' ids of the messages that wait, in the order in which they came."""
    return [json.loads(each)["headers"]["id"] for each in reversed(broker.lrange(QUEUE, 0, -1))]


def test_celery_shows_what_waits_and_what_runs(
    processes: Processes, database: Database, broker: redis.Redis, app: celery.Celery
) -> None:
    first, second = (submit(database, matmul(measure=ENDLESS)) for _ in range(2))
    for job_id in (first, second):
        app.send_task(**message(job_id, CPU))
    assert ids(broker) == [first, second]
    worker = processes.start("worker", "--device", "cpu")
    inspect = app.control.inspect(timeout=2)
    (active,) = eventually(lambda: [each for each in (inspect.active() or {}).values() if each])
    assert [(task["name"], task["id"], task["args"]) for task in active] == [(LOOK_TASK, first, [first])]
    assert ids(broker) == [second]
    assert list((inspect.reserved() or {}).values()) == [[]]
    assert look(database, first).state is JobState.RUNNING
    stop(worker)
    assert [look(database, job_id).state for job_id in (first, second)] == [JobState.QUEUED] * 2


def test_lost_repeated_and_senseless_messages_change_nothing(
    processes: Processes, database: Database, broker: redis.Redis, app: celery.Celery
) -> None:
    told, lost = submit(database, matmul()), submit(database, matmul())
    for each in (message(told, CPU), message(told, CPU), repeated(told, CPU), message(new_id(), CPU)):
        app.send_task(**each)
    worker = processes.start("worker", "--device", "cpu")
    both = (told, lost)
    assert eventually(lambda: all(look(database, job_id).state.is_final for job_id in both), 90)
    assert eventually(lambda: ids(broker) == [])
    stop(worker)
    assert [[attempt.outcome for attempt in look(database, job_id).attempts] for job_id in both] == [
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
