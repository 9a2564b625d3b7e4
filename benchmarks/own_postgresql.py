"""A PostgreSQL database of a benchmark's own, a server process on it, and what its processes use."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil
import psycopg

import migrations
from optigpu.vocabulary import OptiGPUError

SERVER = "postgresql://postgres@127.0.0.1:5432/postgres"
ENDS_WITHIN_S = 60.0
MANY = "999999999/second"


@contextmanager
def own_database(server: str) -> Iterator[str]:
    """The address of a migrated database with empty tables, which is removed at the end."""
    name = f"optigpu_benchmark_{os.getpid()}"
    with psycopg.connect(server, autocommit=True) as connection:
        # Text is compared by its bytes, as in the database of docker-compose.yml.
        connection.execute(f"CREATE DATABASE {name} LC_COLLATE 'C' TEMPLATE template0")
        try:
            url = f"{server.rsplit('/', 1)[0]}/{name}".replace("postgresql://", "postgresql+psycopg://")
            migrations.upgrade(url)
            yield url
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def api_on(url: str, redis: str | None = None, **more: str) -> Iterator[str]:
    """The address of `python -m api` on that database, without a worker or limits of calls; `more` are variables."""
    variables = {
        "OPTIGPU_DATABASE_URL": url,
        "OPTIGPU_EMBEDDED_WORKER": "false",
        "OPTIGPU_RATE_LIMIT": MANY,
        "OPTIGPU_DEVICE_RATE_LIMIT": MANY,
        "OPTIGPU_LOG_LEVEL": "ERROR",
        **({"OPTIGPU_REDIS_URL": redis} if redis else {}),
        **more,
    }
    with started([sys.executable, "-m", "api", "--port", "0"], variables, "OptiGPU listens on ") as address:
        yield address


@contextmanager
def bare_endpoint() -> Iterator[str]:
    """The address of an endpoint of FastAPI that does nothing, for comparison."""
    with started([sys.executable, "-m", "benchmarks.bare_endpoint"], {}, "listens on ") as address:
        yield address


@contextmanager
def started(command: Sequence[str], variables: dict[str, str], says: str) -> Iterator[str]:
    """The address of a server, which says on its first line where it listens."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPTIGPU_")}
    with subprocess.Popen(command, env=inherited | variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline().strip() if process.stdout else ""
            if says not in line:
                raise OptiGPUError("A server could not start, so nothing was measured.")
            yield line.partition(says)[2]
        finally:
            process.terminate()
            process.wait(ENDS_WITHIN_S)


def backends_s() -> float | None:
    """CPU seconds of the server's processes that this process has connections to; None where they cannot be seen.

    The processes that write the log and the pages for all databases are not among them.
    """
    ports = {f"({each.laddr.port})" for each in psutil.Process().net_connections("tcp")}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "postgres" and any(port in " ".join(process.cmdline()) for port in ports):
                times = process.cpu_times()
                found.append(times.user + times.system)
    return sum(found) if found else None
