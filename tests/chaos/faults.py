"""What goes wrong in the chaos test. Each fault returns when what it broke is there again."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGCONT, SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM

import celery
import psutil
import psycopg
import redis

from optigpu.store.doorbell import LOOK_TASK, queue_for
from optigpu.vocabulary import DeviceKind
from tests.chaos.world import LEASE_S, World
from tests.servers.postgres import libpq
from tests.servers.restartable import Program

QUEUE = queue_for(DeviceKind.CPU)
AWAY_S = 1.0
FULL_S = 2.0
MEASURES_WITHIN_S = 30.0


@dataclass(frozen=True)
class Fault:
    """One kind of fault, in words, and what makes it happen."""

    name: str
    happen: Callable[[World, random.Random], None]


def faults(cut_s: float) -> tuple[Fault, ...]:
    """All kinds; the network is cut for so many seconds."""
    return (
        Fault("a worker is killed", _kill_worker),
        Fault("a worker is asked to stop", _stop_worker),
        Fault("a measuring process is killed", _kill_child),
        Fault("an API is killed", _kill_api),
        Fault("Redis is restarted", _restart_redis),
        Fault("Redis is emptied", _empty_redis),
        Fault("PostgreSQL is restarted", lambda world, _: _restart(world, SIGINT)),
        Fault("PostgreSQL crashes and recovers", lambda world, _: _restart(world, SIGQUIT)),
        Fault("a worker stands still beyond its lease", _freeze_worker),
        Fault("rings are delivered twice", _ring_twice),
        Fault("the disk for results is full", _fill_disk),
        Fault(f"the network to the database is cut for {cut_s:g} s", lambda world, _: _cut(world, cut_s)),
    )


def _kill_worker(world: World, random_: random.Random) -> None:
    program, _ = _measuring(world, random_)
    program.end(SIGKILL)
    program.start()


def _stop_worker(world: World, random_: random.Random) -> None:
    program, _ = _measuring(world, random_)
    program.end(SIGTERM)
    program.start()


def _kill_child(world: World, random_: random.Random) -> None:
    _, child = _measuring(world, random_)
    with suppress(psutil.NoSuchProcess):
        child.kill()


def _measuring(world: World, random_: random.Random) -> tuple[Program, psutil.Process]:
    """A worker that measures just now, and its measuring process: a fault should hit something."""
    deadline = time.monotonic() + MEASURES_WITHIN_S
    while time.monotonic() < deadline:
        for program in random_.sample(world.workers, len(world.workers)):
            with suppress(psutil.Error):
                for child in psutil.Process(program.pid).children():
                    if "-S" in child.cmdline():
                        return program, child
        time.sleep(0.02)
    raise TimeoutError("No worker measures: let there be more jobs, or fewer faults.")


def _kill_api(world: World, random_: random.Random) -> None:
    program = random_.choice(world.apis)
    program.end(SIGKILL)
    time.sleep(AWAY_S)
    program.start()


def _restart_redis(world: World, _: random.Random) -> None:
    world.redis.end(SIGTERM)
    time.sleep(AWAY_S)
    world.redis.start()


def _empty_redis(world: World, _: random.Random) -> None:
    with redis.Redis.from_url(world.redis_url) as client:
        client.flushall()


def _restart(world: World, how: int) -> None:
    world.database.end(SIGINT if how == SIGINT else SIGQUIT)
    time.sleep(AWAY_S)
    world.database.start()


def _freeze_worker(world: World, random_: random.Random) -> None:
    program, _ = _measuring(world, random_)
    program.send(SIGSTOP)
    time.sleep(LEASE_S + 1.0)
    program.send(SIGCONT)


def _ring_twice(world: World, _: random.Random) -> None:
    """Each message that waits is there once more, and some ring for nothing."""
    with redis.Redis.from_url(world.redis_url) as client:
        for message in client.lrange(QUEUE, 0, -1):
            client.lpush(QUEUE, message)
    with celery.Celery(broker=world.redis_url, set_as_current=False) as app:
        for _ring in range(3):
            app.send_task(LOOK_TASK, queue=QUEUE, ignore_result=True)


def _fill_disk(world: World, _: random.Random) -> None:
    """PostgreSQL refuses new results as it does when its disk is full."""
    with psycopg.connect(libpq(world.database_url), autocommit=True) as connection:
        connection.execute(
            "CREATE OR REPLACE FUNCTION disk_is_full() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$"
        )
        connection.execute(
            "CREATE TRIGGER disk_is_full BEFORE INSERT ON samples EXECUTE FUNCTION disk_is_full()"
        )
        time.sleep(FULL_S)
        connection.execute("DROP TRIGGER disk_is_full ON samples")


def _cut(world: World, seconds: float) -> None:
    world.gate.shut()
    time.sleep(seconds)
    world.gate.open()
