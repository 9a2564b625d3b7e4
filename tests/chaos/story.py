"""Jobs are posted while everything goes wrong; at the end nothing may be lost, doubled or left behind."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM, Signals
from typing import Any

import celery
import httpx
import psutil
import psycopg
import redis

from optigpu.store.workers import LOOK_TASK, queue_for
from optigpu.vocabulary import DeviceKind
from tests.chaos.worker import figure
from tests.chaos.world import LEASE_S, MARK, Program, World, running
from tests.servers.databases import libpq
from tests.service.processes import processes_left

ANSWER_WITHIN_S = 30.0
ENDED_WITHIN_S = 120.0
FINAL = ("succeeded", "failed", "cancelled")
CANCELLED, POSTED_TWICE = 0.05, 0.1
"""Shares of the jobs."""
QUEUE = queue_for(DeviceKind.CPU)
AWAY_S = 1.0
FULL_S = 2.0
MEASURES_WITHIN_S = 30.0


@dataclass(frozen=True)
class Fault:
    """One kind of fault, in words, and what makes it happen."""

    name: str
    happen: Callable[[World, random.Random], None]


@dataclass(frozen=True)
class Plan:
    """How much of it: jobs, seconds between two of them, faults of each kind, seconds between two faults.

    There are more jobs while there are faults to come, which would hit nothing without them.
    """

    jobs: int = 300
    every_s: float = 0.5
    rounds: int = 2
    pause_s: float = 2.0
    cut_s: float = 10.0
    seed: int = 0


@dataclass
class Account:
    """What happened, and what is wrong with it."""

    injected: Counter[str] = field(default_factory=Counter)
    accepted: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def chaos(plan: Plan, folder: Path) -> Account:
    """Plays it; whatever is wrong at the end is in the account."""
    account, begun = Account(), time.monotonic()
    with running(folder) as world:
        over = threading.Event()
        poster = threading.Thread(target=_post_all, args=(plan, world, account, over))
        poster.start()
        try:
            order = list(faults(plan.cut_s)) * plan.rounds
            random.Random(plan.seed).shuffle(order)
            for fault in order:
                fault.happen(world, random.Random(f"{plan.seed} {len(account.injected)}"))
                account.injected[fault.name] += 1
                time.sleep(plan.pause_s)
        finally:
            over.set()
        poster.join()
        _wait_for_the_end(world, account)
        account.wrong += _wrong_in_database(world, account)
        mark = world.mark
    left = processes_left(MARK, mark)
    account.wrong += [f"a process was left behind: {process.cmdline()}" for process in left]
    account.seconds = time.monotonic() - begun
    return account


def _post_all(plan: Plan, world: World, account: Account, over: threading.Event) -> None:
    """One client, which tries again until each job is accepted, as clients with an idempotency key may."""
    random_ = random.Random(plan.seed)
    for number in count():
        if number >= plan.jobs and over.is_set():
            return
        time.sleep(plan.every_s)
        # No two jobs ask for the same, so that each is measured.
        sizes = [64 + 3 * number + more for more in range(random_.randint(1, 3))]
        document = {"workload": {"kind": "matmul", "sizes": sizes}, "limits": {"wait_for_quiet_s": 0}}
        key = {"Idempotency-Key": f"job {number}"}
        job = _answer(world, random_, "POST", "/v1/jobs", json=document, headers=key)
        account.accepted[job["id"]] = document
        if random_.random() < POSTED_TWICE:
            again = _answer(world, random_, "POST", "/v1/jobs", json=document, headers=key)
            if again["id"] != job["id"]:
                account.wrong.append(f"the same post made jobs {job['id']} and {again['id']}")
        if random_.random() < CANCELLED:
            _answer(world, random_, "POST", f"/v1/jobs/{job['id']}/cancel")


def _answer(world: World, random_: random.Random, method: str, path: str, **given: Any) -> dict[str, Any]:
    """The answer of either API, as soon as one of them gives one."""
    while True:
        with suppress(httpx.TransportError):
            url = random_.choice(world.urls) + path
            answer = httpx.request(method, url, timeout=ANSWER_WITHIN_S, **given)
            if answer.status_code < 500:
                answer.raise_for_status()
                document: dict[str, Any] = answer.json()
                return document
        time.sleep(0.2)


def _wait_for_the_end(world: World, account: Account) -> None:
    deadline = time.monotonic() + ENDED_WITHIN_S
    while (states := _states(world)).keys() - set(FINAL) and time.monotonic() < deadline:
        time.sleep(0.5)
    account.states.update(states)


def _states(world: World) -> dict[str, int]:
    with psycopg.connect(libpq(world.database_url)) as connection:
        return dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())


def _wrong_in_database(world: World, account: Account) -> list[str]:
    with psycopg.connect(libpq(world.database_url)) as connection:
        account.attempts.update(
            dict(connection.execute("SELECT outcome, count(*) FROM attempts GROUP BY outcome").fetchall())
        )
        jobs: dict[str, str] = dict(connection.execute("SELECT id, state FROM jobs").fetchall())
        wrong = [*_wrong_jobs(jobs, account.accepted), *_wrong_results(connection, jobs, account.accepted)]
        for what, query in NOTHING.items():
            wrong += [f"{what}: {row}" for row in connection.execute(query).fetchmany(5)]
    return wrong


NOTHING = {
    "an attempt has no end": "SELECT job_id, number FROM attempts WHERE outcome IS NULL",
    "events are lost": (
        "SELECT job_id FROM job_events JOIN jobs ON jobs.id = job_id GROUP BY job_id, last_sequence "
        "HAVING count(*) <> last_sequence OR max(sequence) <> last_sequence"
    ),
    "a result belongs to no variant": (
        "SELECT id FROM results WHERE id NOT IN (SELECT result_id FROM variants WHERE result_id IS NOT NULL)"
    ),
    "a result is not on the leaderboard": (
        "SELECT id FROM results WHERE id NOT IN (SELECT result_id FROM leaderboard)"
    ),
    "a variant has not ended": "SELECT job_id, index FROM variants WHERE status IN ('pending', 'running')",
    "a transaction holds locks": (
        "SELECT pid, query FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' "
        "AND state_change < now() - interval '5 seconds'"
    ),
}
"""Queries that find nothing if all is well."""


def _wrong_jobs(jobs: Mapping[str, str], accepted: Mapping[str, Any]) -> Iterator[str]:
    for job_id in accepted.keys() - jobs.keys():
        yield f"job {job_id} was accepted and is lost"
    for job_id in jobs.keys() - accepted.keys():
        yield f"job {job_id} was never accepted"
    for job_id, state in jobs.items():
        if state not in FINAL:
            yield f"job {job_id} is {state} at the end"


def _wrong_results(
    connection: psycopg.Connection[Any], jobs: Mapping[str, str], accepted: Mapping[str, dict[str, Any]]
) -> Iterator[str]:
    found: dict[str, list[float]] = {}
    query = "SELECT results.job_id, value FROM results JOIN metrics ON result_id = results.id"
    for job_id, value in connection.execute(query):
        found.setdefault(job_id, []).append(value)
    for job_id, state in jobs.items():
        asked = accepted.get(job_id, {}).get("workload", {}).get("sizes", [])
        expected = sorted(figure({"sizes": [size]}) for size in asked)
        stored = sorted(found.get(job_id, ()))
        if len(set(stored)) != len(stored):
            yield f"job {job_id} has a result twice"
        if set(stored) - set(expected) or (state == "succeeded" and not stored):
            yield f"job {job_id} is {state} with {stored}, and {expected} was asked for"


def faults(cut_s: float) -> tuple[Fault, ...]:
    """All kinds; the network is cut for so many seconds."""
    return (
        Fault("a worker is killed", lambda world, random_: _end_worker(world, random_, SIGKILL)),
        Fault("a worker is asked to stop", lambda world, random_: _end_worker(world, random_, SIGTERM)),
        Fault("a measuring process is killed", _kill_child),
        Fault("an API is killed", lambda world, random_: _restart(random_.choice(world.apis), SIGKILL)),
        Fault("Redis is restarted", lambda world, _: _restart(world.redis, SIGTERM)),
        Fault("Redis is emptied", _empty_redis),
        Fault("PostgreSQL is restarted", lambda world, _: _restart(world.database, SIGINT)),
        Fault("PostgreSQL crashes and recovers", lambda world, _: _restart(world.database, SIGQUIT)),
        Fault("a worker stands still beyond its lease", _freeze_worker),
        Fault("rings are delivered twice", _ring_twice),
        Fault("the disk for results is full", _fill_disk),
        Fault(f"the network to the database is cut for {cut_s:g} s", lambda world, _: _cut(world, cut_s)),
    )


def _end_worker(world: World, random_: random.Random, how: Signals) -> None:
    program, _ = _measuring(world, random_)
    program.end(how)
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


def _restart(program: Program, how: Signals) -> None:
    program.end(how)
    time.sleep(AWAY_S)
    program.start()


def _empty_redis(world: World, _: random.Random) -> None:
    with redis.Redis.from_url(world.redis_url) as client:
        client.flushall()


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
