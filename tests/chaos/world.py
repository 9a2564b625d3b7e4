"""The whole service for the chaos test: PostgreSQL, Redis, two APIs, three workers, each of which can be ended."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGTERM

import httpx

import migrations
from tests.chaos.worker import HOURS
from tests.servers.process import free_port
from tests.servers.restartable import Program, postgres, redis_server
from tests.service.gate import Gate, gate_to

MARK = "LC_OPTIGPU_CHAOS"
LEASE_S = 3.0
CLOCKS_H = (0.0, 5.0, -7.0)
"""How far the clock of each worker is off."""


@dataclass(frozen=True)
class World:
    """What runs. Everything but the tests' own connections goes through the gate to the database."""

    database: Program
    database_url: str
    gate: Gate
    redis: Program
    redis_url: str
    apis: tuple[Program, ...]
    urls: tuple[str, ...]
    workers: tuple[Program, ...]
    mark: str


@contextmanager
def running(folder: Path) -> Iterator[World]:
    """Everything is started, and ended at the end; what each process prints is in the folder."""
    mark = uuid.uuid4().hex
    with ExitStack() as stack:
        database, database_url = stack.enter_context(postgres("max_connections=100"))
        migrations.upgrade(database_url)
        gate = stack.enter_context(gate_to(database_url, 5432))
        gate.open()
        redis, redis_url = stack.enter_context(redis_server())
        variables = {
            MARK: mark,
            "OPTIGPU_DATA_DIR": str(folder),
            "OPTIGPU_DATABASE_URL": gate.url,
            "OPTIGPU_REDIS_URL": redis_url,
            "OPTIGPU_LEASE_S": str(LEASE_S),
            "OPTIGPU_SWEEP_S": "0.5",
            "OPTIGPU_RATE_LIMIT": "1000000/minute",
        }
        ports = [free_port(), free_port()]
        apis = [_api(folder, variables, port) for port in ports]
        workers = [_worker(folder, variables, number) for number in range(len(CLOCKS_H))]
        stack.callback(_end_all, (*apis, *workers))
        with ThreadPoolExecutor() as starting:
            list(starting.map(Program.start, (*apis, *workers)))
        yield World(
            database=database,
            database_url=database_url,
            gate=gate,
            redis=redis,
            redis_url=redis_url,
            apis=tuple(apis),
            urls=tuple(_url(port) for port in ports),
            workers=tuple(workers),
            mark=mark,
        )


def _end_all(programs: Sequence[Program]) -> None:
    """All are told before one is waited for."""
    with ThreadPoolExecutor(len(programs)) as ending:
        list(ending.map(_ended, programs))


def _ended(program: Program) -> None:
    if program.is_started:
        program.send(SIGCONT)
        program.end(SIGTERM)


def _api(folder: Path, variables: dict[str, str], port: int) -> Program:
    def answers() -> bool:
        try:
            return httpx.get(f"{_url(port)}/healthz", timeout=5).is_success
        except httpx.TransportError:
            return False

    return Program(lambda: _started(folder, f"api-{port}", ["api", "--port", str(port)], variables), answers)


def _worker(folder: Path, variables: dict[str, str], number: int) -> Program:
    off = {HOURS: str(CLOCKS_H[number])}
    command = ["tests.chaos.worker", "--device", "cpu"]
    return Program(lambda: _started(folder, f"worker-{number}", command, variables | off), lambda: True)


def _started(
    folder: Path, name: str, command: list[str], variables: dict[str, str]
) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPTIGPU_")}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=inherited | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
