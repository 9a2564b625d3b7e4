"""PostgreSQL and Redis for the tests: the servers, databases that live as long as a test or a session, and one of
Redis's numbered ones for a session alone."""

import getpass
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import redis
from sqlalchemy import URL, make_url

from tests.servers.process import (
    Machine,
    NoServerError,
    Server,
    free_port,
    run_to_end,
    scratch_folder,
    serve,
    server_account,
)
from tests.servers.rule import Kind

DRIVER = "postgresql+psycopg"
# Nothing here has to survive a power cut.
UNSAFE_AND_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


@contextmanager
def fresh_database(server_url: str) -> Iterator[str]:
    """The URL of a new, empty database under a name of its own; it is dropped at the end, in use or not."""
    name = f"optigpu_test_{uuid.uuid4().hex}"
    _execute(server_url, f"CREATE DATABASE {name}")
    try:
        yield _text(make_url(server_url).set(drivername=DRIVER, database=name))
    finally:
        _execute(server_url, f"DROP DATABASE {name} WITH (FORCE)")


def libpq(url: str) -> str:
    """The same URL for psycopg itself, which does not know SQLAlchemy's driver names."""
    return _text(make_url(url).set(drivername="postgresql"))


def _execute(url: str, statement: str) -> None:
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        connection.execute(statement)


def _answers(url: str) -> bool:
    """Whether a server is there that lets us create databases."""
    try:
        with psycopg.connect(libpq(url), connect_timeout=3) as connection:
            role = connection.execute(
                "SELECT rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
    except psycopg.OperationalError:
        return False
    return role == (True,)


def _candidates(machine: Machine, port: int) -> list[str]:
    users = dict.fromkeys([machine.environment.get("PGUSER", "postgres"), "postgres", getpass.getuser()])
    return [_local(user, port, database) for user in users for database in ("postgres", "test")]


def _start(machine: Machine) -> Server | None:
    initdb, postgres = machine.program("initdb"), machine.program("postgres")
    if initdb is None or postgres is None:
        return None
    account = server_account()
    folder = scratch_folder(account)
    port = free_port()
    settings = [f"port={port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={folder}"]
    try:
        run_to_end(
            [initdb, "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"],
            folder,
            account,
        )
    except BaseException:
        shutil.rmtree(folder)
        raise
    options = [word for setting in (*settings, *UNSAFE_AND_FAST) for word in ("-c", setting)]
    command = [postgres, "-D", "data", *options]
    return serve(command, folder, account, _local("postgres", port, "postgres"), _answers)


def _local(user: str, port: int, database: str) -> str:
    return _text(URL.create(DRIVER, user, host="127.0.0.1", port=port, database=database))


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


POSTGRES = Kind(
    name="PostgreSQL",
    variable="OPTIGPU_TEST_DATABASE_URL",
    standard_port=5432,
    package="postgresql",
    image="postgres:17",
    image_environment=("POSTGRES_HOST_AUTH_METHOD=trust",),
    candidates=_candidates,
    answers=_answers,
    programs=("initdb", "postgres"),
    start=_start,
)


LEASE_KEY = "optigpu:tests:lease"
LEASE_S = 3600
DATABASES = 16  # Redis's default


@contextmanager
def leased_database(server_url: str) -> Iterator[str]:
    """The URL of a database of this server that was empty; it is emptied again at the end.

    A developer's own Redis holds data, and several test sessions may run at once: so take an empty
    database, highest number first, and mark it as taken.
    """
    for number in reversed(range(DATABASES)):
        url = f"{server_url}/{number}"
        with redis.Redis.from_url(url) as database:
            if not _take(database):
                continue
            try:
                yield url
            finally:
                database.flushdb()
            return
    raise NoServerError(
        f"Every database of the Redis at {server_url} holds data: empty one, or set OPTIGPU_TEST_REDIS_URL."
    )


def _take(database: redis.Redis) -> bool:
    if not database.set(LEASE_KEY, "taken", nx=True, ex=LEASE_S):
        return False
    if database.dbsize() == 1:
        return True
    database.delete(LEASE_KEY)
    return False


def _redis_answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=3) as server:
            return bool(server.ping())
    except redis.RedisError:
        return False


def _redis_candidates(machine: Machine, port: int) -> list[str]:
    return [f"redis://127.0.0.1:{port}"]


def _start_redis(machine: Machine) -> Server | None:
    program = machine.program("redis-server")
    if program is None:
        return None
    port = free_port()
    network = ["--port", str(port), "--bind", "127.0.0.1"]
    command = [program, *network, "--save", "", "--appendonly", "no"]
    return serve(command, scratch_folder(None), None, f"redis://127.0.0.1:{port}", _redis_answers)


REDIS = Kind(
    name="Redis",
    variable="OPTIGPU_TEST_REDIS_URL",
    standard_port=6379,
    package="redis-server",
    image="redis:7-alpine",
    image_environment=(),
    candidates=_redis_candidates,
    answers=_redis_answers,
    programs=("redis-server",),
    start=_start_redis,
)
