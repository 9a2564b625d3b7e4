"""Redis for the tests: the server, and one of its numbered databases for a session alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from tests.servers.process import Machine, NoServerError, Server, free_port, scratch_folder, serve
from tests.servers.rule import Kind

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


def _answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=3) as server:
            return bool(server.ping())
    except redis.RedisError:
        return False


def _candidates(machine: Machine, port: int) -> list[str]:
    return [f"redis://127.0.0.1:{port}"]


def _start(machine: Machine) -> Server | None:
    program = machine.program("redis-server")
    if program is None:
        return None
    port = free_port()
    network = ["--port", str(port), "--bind", "127.0.0.1"]
    command = [program, *network, "--save", "", "--appendonly", "no"]
    return serve(command, scratch_folder(None), None, f"redis://127.0.0.1:{port}", _answers)


REDIS = Kind(
    name="Redis",
    variable="OPTIGPU_TEST_REDIS_URL",
    standard_port=6379,
    package="redis-server",
    image="redis:7-alpine",
    image_environment=(),
    candidates=_candidates,
    answers=_answers,
    programs=("redis-server",),
    start=_start,
)
