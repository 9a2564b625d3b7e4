"""Servers that a benchmark has for itself: a database on a PostgreSQL that runs, and the API as a process."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

import migrations
from optigpu.vocabulary import OptiGPUError

SERVER = "postgresql://postgres@127.0.0.1:5432/postgres"
ENDS_WITHIN_S = 60.0
MANY = "999999999/second"


@dataclass(frozen=True)
class Started:
    """A server's address and its process."""

    address: str
    pid: int


@contextmanager
def database(server: str) -> Iterator[str]:
    """A migrated database with empty tables, by psycopg's own kind of address; it is dropped at the end."""
    name = f"optigpu_scale_{os.getpid()}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            url = server.rsplit("/", 1)[0] + f"/{name}"
            migrations.upgrade(sqlalchemy_url(url))
            yield url
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def sqlalchemy_url(url: str) -> str:
    """The same address as the service writes it."""
    return url.replace("postgresql://", "postgresql+psycopg://")


@contextmanager
def service(url: str) -> Iterator[Started]:
    """The API on that database, without a worker and without a limit of calls."""
    variables = {
        "OPTIGPU_DATABASE_URL": sqlalchemy_url(url),
        "OPTIGPU_EMBEDDED_WORKER": "false",
        "OPTIGPU_RATE_LIMIT": MANY,
    }
    with started([sys.executable, "-m", "api", "--port", "0"], variables, "OptiGPU listens on ") as server:
        yield server


@contextmanager
def started(command: Sequence[str], variables: dict[str, str], says: str) -> Iterator[Started]:
    """A server that says on its first line where it listens."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPTIGPU_")}
    with subprocess.Popen(command, env=inherited | variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline().strip() if process.stdout else ""
            if says not in line:
                raise OptiGPUError("A server could not start, so nothing was measured.")
            yield Started(line.partition(says)[2], process.pid)
        finally:
            process.terminate()
            process.wait(ENDS_WITHIN_S)
