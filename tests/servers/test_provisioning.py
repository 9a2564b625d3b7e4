"""Throw-away servers really start, serve and go; the databases on a server come and go as promised."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from sqlalchemy import make_url

from tests.servers.machine import this_machine
from tests.servers.postgres import POSTGRES, fresh_database, libpq
from tests.servers.process import NoServerError, scratch_folder, serve
from tests.servers.redis import LEASE_KEY, REDIS, leased_database
from tests.servers.rule import Kind

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

KINDS = pytest.mark.parametrize("kind", [POSTGRES, REDIS], ids=lambda kind: kind.name)


@KINDS
def test_a_throw_away_server_serves_and_goes(kind: Kind) -> None:
    server = kind.start(this_machine())
    # Without its programs a machine gets its servers in another way, which it learns by this None.
    assert (server is not None) == installed(kind)
    if server is None:
        return
    assert kind.answers(server.url)
    folder = folder_of(server.url)
    assert folder.is_dir()
    server.stop()
    assert not listens(server.url)
    assert not folder.exists()


START_AND_WAIT = """
import sys, time
from tests.servers import postgres, redis
from tests.servers.machine import this_machine
kind = {"PostgreSQL": postgres.POSTGRES, "Redis": redis.REDIS}[sys.argv[1]]
server = kind.start(this_machine())
try:
    print(server.url if server else "", flush=True)
    time.sleep(60)
finally:
    if server:
        server.stop()
"""


@KINDS
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL], ids=lambda ending: ending.name)
def test_a_throw_away_server_does_not_outlive_its_session(kind: Kind, ending: signal.Signals) -> None:
    command = [sys.executable, "-c", START_AND_WAIT, kind.name]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as session:
        assert session.stdout is not None
        url = session.stdout.readline().strip()
        assert bool(url) == installed(kind)
        folder = folder_of(url) if url else None
        session.send_signal(ending)
        session.wait()
    if folder is None:
        return
    wait_until(lambda: not listens(url))
    if ending is signal.SIGKILL:  # nobody was left to remove it
        shutil.rmtree(folder)
    assert not folder.exists()


def test_a_server_that_cannot_start_says_why_and_leaves_no_folder() -> None:
    folder = scratch_folder(None)
    command = [sys.executable, "-c", "raise SystemExit('the disk is full')"]
    with pytest.raises(NoServerError, match="the disk is full"):
        serve(command, folder, None, "redis://127.0.0.1:1", answers=lambda _: False)
    assert not folder.exists()


def test_a_fresh_database_is_empty_and_dropped_even_while_in_use(postgres_server_url: str) -> None:
    with fresh_database(postgres_server_url) as url:
        address = make_url(url)
        assert address.drivername == "postgresql+psycopg"
        connection = psycopg.connect(libpq(url))
        tables = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        assert tables.fetchone() == (0,)
        with fresh_database(postgres_server_url) as other_url:
            assert other_url != url
    with closing(connection), pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    with psycopg.connect(libpq(postgres_server_url)) as server:
        names = server.execute("SELECT 1 FROM pg_database WHERE datname = %s", [address.database])
        assert names.fetchone() is None


def test_the_database_fixture_gives_an_engine_s_empty_database(database_url: str) -> None:
    address = make_url(database_url)
    assert address.drivername in ("sqlite", "postgresql+psycopg")
    if address.drivername == "sqlite":
        assert not Path(str(address.database)).exists()
    else:
        with psycopg.connect(libpq(database_url)) as connection:
            assert connection.execute("SELECT current_database()").fetchone() == (address.database,)


def test_the_session_s_databases_serve(postgres_url: str, redis_url: str) -> None:
    assert POSTGRES.answers(postgres_url)
    assert REDIS.answers(redis_url)


def test_a_leased_redis_database_is_empty_and_nobody_else_s_until_it_is_given_back(redis_url: str) -> None:
    server_url = without_database(redis_url)
    with leased_database(server_url) as url, redis.Redis.from_url(url) as database:
        assert database.keys("*") == [LEASE_KEY.encode()]
        database.set("left", "behind")
        with leased_database(server_url) as other_url:
            assert other_url not in (url, redis_url)
    with redis.Redis.from_url(url) as database:
        assert database.get("left") is None


def test_a_redis_database_that_holds_data_is_not_leased(redis_url: str) -> None:
    server_url = without_database(redis_url)
    with leased_database(server_url) as url:
        taken = url
    with redis.Redis.from_url(taken) as database:
        database.set("somebody", "else")
        with leased_database(server_url) as url:
            assert url != taken
        assert database.get("somebody") == b"else"
        database.delete("somebody")


def test_a_redis_without_an_empty_database_says_so(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.servers.redis.DATABASES", 0)
    with pytest.raises(NoServerError, match="set OPTIGPU_TEST_REDIS_URL"), leased_database(redis_url):
        pass


def installed(kind: Kind) -> bool:
    return all(this_machine().program(name) for name in kind.programs)


def listens(url: str) -> bool:
    address = make_url(url)
    with closing(socket.socket()) as client:
        return client.connect_ex((address.host, address.port)) == 0


def folder_of(url: str) -> Path:
    """The scratch folder that a server says it works in."""
    if url.startswith("redis://"):
        with redis.Redis.from_url(url) as server:
            return Path(server.config_get("dir")["dir"])
    with psycopg.connect(libpq(url)) as server:
        row = server.execute("SHOW data_directory").fetchone()
        assert row is not None
        return Path(row[0]).parent


def without_database(redis_url: str) -> str:
    return urlsplit(redis_url)._replace(path="").geturl()


def wait_until(happens: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, f"still not so after {timeout_s} s"
        time.sleep(0.05)
