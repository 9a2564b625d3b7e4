"""Servers that can be ended by any signal and started again at the same place, with what they had stored."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import redis

from tests.servers.machine import this_machine
from tests.servers.process import (
    NoServerError,
    free_port,
    run_to_end,
    scratch_folder,
    server_account,
    wait_until_it_answers,
)

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


@contextmanager
def postgres(*settings: str) -> Iterator[tuple[Program, str]]:
    """A PostgreSQL server with its own data, as durable as by default, and the URL of its database."""
    account = server_account()
    initdb, server = _program("initdb", "postgresql"), _program("postgres", "postgresql")
    folder, port = scratch_folder(account), free_port()
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
    identity: dict[str, Any] = (
        {"user": account.uid, "group": account.gid, "extra_groups": []} if account else {}
    )
    given = [f"port={port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={folder}", *settings]
    command = [server, "-D", "data", *(word for setting in given for word in ("-c", setting))]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=folder, **QUIET, **identity)

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
