"""The whole service for the chaos test: PostgreSQL, Redis, two APIs, three workers, each of which can be ended."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGTERM
from typing import Any

import httpx
import psycopg
import redis

import migrations
from tests.chaos.worker import HOURS
from tests.servers.process import (
    NoServerError,
    free_port,
    identity,
    run_to_end,
    scratch_folder,
    server_account,
    this_machine,
    wait_until_it_answers,
)
from tests.service.receiver import Gate, gate_to

MARK = "LC_OPTIGPU_CHAOS"
LEASE_S = 3.0
CLOCKS_H = (0.0, 5.0, -7.0)
"""How far the clock of each worker is off."""
QUIET: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class Program:
    """A process that can be ended and started again at the same place."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], answers: Callable[[], bool]) -> None:
        self._start, self._answers = start, answers
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def is_started(self) -> bool:
        """Whether it was ever started."""
        return self._process is not None

    def start(self) -> None:
        """Returns when it answers. Raises NoServerError if it does not."""
        self._process = self._start()
        wait_until_it_answers(self._answers, "the server")

    def end(self, number: signal.Signals) -> None:
        """Sends a signal and waits for the end."""
        assert self._process
        self._process.send_signal(number)
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal that does not end it."""
        os.kill(self.pid, number)


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


@contextmanager
def postgres(*settings: str) -> Iterator[tuple[Program, str]]:
    """A PostgreSQL server with its own data, as durable as by default, and the URL of its database."""
    account = server_account()
    initdb, server = _program("initdb", "postgresql"), _program("postgres", "postgresql")
    folder, port = scratch_folder(account), free_port()
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
    given = [f"port={port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={folder}", *settings]
    command = [server, "-D", "data", *(word for setting in given for word in ("-c", setting))]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=folder, **QUIET, **identity(account))

    def answers() -> bool:
        try:
            psycopg.connect(url, connect_timeout=3).close()
        except psycopg.OperationalError:
            return False
        return True

    run_to_end([initdb, "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8"], folder, account)
    program = Program(start, answers)
    try:
        program.start()
        yield program, url.replace("postgresql:", "postgresql+psycopg:")
    finally:
        program.end(signal.SIGINT)
        shutil.rmtree(folder)


@contextmanager
def redis_server() -> Iterator[tuple[Program, str]]:
    """A Redis server that stores nothing on disk, and its URL."""
    server, port = _program("redis-server", "redis-server"), free_port()
    url = f"redis://127.0.0.1:{port}/0"
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]

    def answers() -> bool:
        try:
            with redis.Redis.from_url(url, socket_connect_timeout=3) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    program = Program(lambda: subprocess.Popen(command, **QUIET), answers)
    program.start()
    try:
        yield program, url
    finally:
        program.end(signal.SIGTERM)


def _program(name: str, package: str) -> str:
    found = this_machine().program(name)
    if found is None:
        raise NoServerError(f"The program {name} is needed: install the package {package}.")
    return str(found)
