"""Jobs are posted while everything goes wrong; at the end nothing may be lost, doubled or left behind."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psycopg

from tests.chaos.engine import figure
from tests.chaos.faults import Fault, faults
from tests.chaos.world import MARK, World, running
from tests.servers.postgres import libpq
from tests.service.processes import processes_left

ANSWER_WITHIN_S = 30.0
ENDED_WITHIN_S = 120.0
FINAL = ("succeeded", "failed", "cancelled")
CANCELLED, POSTED_TWICE = 0.05, 0.1
"""Shares of the jobs."""


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
            for fault in _in_some_order(plan):
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


def _in_some_order(plan: Plan) -> list[Fault]:
    order = list(faults(plan.cut_s)) * plan.rounds
    random.Random(plan.seed).shuffle(order)
    return order


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
        try:
            answer = httpx.request(
                method, random_.choice(world.urls) + path, timeout=ANSWER_WITHIN_S, **given
            )
        except httpx.TransportError:
            time.sleep(0.2)
            continue
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
