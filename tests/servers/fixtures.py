"""Fixtures for tests that need PostgreSQL, Redis, Slurm or a program of Debian's: real ones, when a first test asks."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.databases import POSTGRES, REDIS, fresh_database, leased_database
from tests.servers.process import NoServerError, Server, this_machine
from tests.servers.rule import PROGRAMS, Kind, program, provide
from tests.servers.slurm import SLURM, Cluster, cluster_of


@pytest.fixture(scope="session")
def postgres_server_url() -> Iterator[str]:
    """A server on which databases may be created; a test works in `postgres_url` or `database_url`."""
    server = _provide_or_fail(POSTGRES)
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def postgres_url(postgres_server_url: str) -> Iterator[str]:
    """An empty PostgreSQL database that this session's tests share: `postgresql+psycopg://...`."""
    with fresh_database(postgres_server_url) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A separate database for each test, without tables; the test runs once on each engine."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'optigpu.db'}"
        return
    with fresh_database(request.getfixturevalue("postgres_server_url")) as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis database that this session's tests share: empty, unless OPTIGPU_TEST_REDIS_URL names one."""
    server = _provide_or_fail(REDIS)
    if server.origin == "variable":
        yield server.url
    else:
        with leased_database(server.url) as url:
            yield url
    server.stop()


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A cluster of one node with two CPUs and two GPUs that are none; `SLURM_CONF` names it to Slurm's programs."""
    server = _provide_or_fail(SLURM)
    os.environ["SLURM_CONF"] = server.url
    yield cluster_of(server)
    del os.environ["SLURM_CONF"]
    server.stop()


@pytest.fixture(scope="session")
def nginx() -> str:
    return _program_or_fail("nginx")


@pytest.fixture(scope="session")
def caddy() -> str:
    return _program_or_fail("caddy")


@pytest.fixture(scope="session")
def promtool() -> str:
    return _program_or_fail("promtool")


def _program_or_fail(name: str) -> str:
    try:
        return program(name, PROGRAMS[name], this_machine())
    except NoServerError as error:
        sentence = str(error)
    pytest.fail(sentence, pytrace=False)


def _provide_or_fail(kind: Kind) -> Server:
    try:
        return provide(kind, this_machine())
    except NoServerError as error:
        sentence = str(error)
    pytest.fail(sentence, pytrace=False)
