"""The service for tests that talk to it over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optigpu.store import keys
from optigpu.store.database import Database
from optigpu.store.tables import Base
from tests.engine.forked import forked_children as forked_children
from tests.servers.databases import fresh_database
from tests.service.serving import Served, migrated, serving


@pytest.fixture(scope="session")
def service_on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One service for all tests of the session; without a worker and without keys."""
    folder = tmp_path_factory.mktemp("service")
    with serving(f"sqlite:///{folder / 'optigpu.db'}") as served:
        yield served


@pytest.fixture(scope="session")
def service_on_postgresql(postgres_server_url: str) -> Iterator[Served]:
    """The same on the other database."""
    with fresh_database(postgres_server_url) as url, serving(url) as served:
        yield served


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs one test of each file of HTTP calls on PostgreSQL, and all of them on SQLite.

    The store's own tests, which use `database`, run on both.
    """
    journeys: set[Path] = set()
    for item in items:
        if "service" in getattr(item, "fixturenames", ()) and "postgresql" in item.name:
            if item.path in journeys:
                item.add_marker(pytest.mark.long)
            journeys.add(item.path)


def empty(database: Database) -> None:
    """Deletes every row."""
    with database.write() as session:
        for table in reversed(Base.metadata.sorted_tables):
            session.execute(table.delete())


@contextmanager
def emptied(served: Served) -> Iterator[Served]:
    """The service with an empty database; keys that are made are revoked at the end, so that it is open again."""
    empty(served.database)
    yield served
    with served.database.write() as session:
        for key in keys.list_(session):
            keys.revoke(session, key.id)


@pytest.fixture(params=["sqlite", "postgresql"])
def service(request: pytest.FixtureRequest) -> Served:
    """The service with an empty database; the test runs once on each engine, see above."""
    served: Served = request.getfixturevalue(f"service_on_{request.param}")
    empty(served.database)
    return served


@pytest.fixture
def guarded(service: Served) -> Iterator[Served]:
    """The service for a test that creates keys."""
    with emptied(service) as served:
        yield served


@pytest.fixture
def any_service(service_on_sqlite: Served) -> Served:
    """A service for tests that store nothing and do not care what is stored."""
    return service_on_sqlite


@pytest.fixture(scope="session")
def sqlite_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A migrated SQLite file that the session's tests share."""
    with migrated(f"sqlite:///{tmp_path_factory.mktemp('store') / 'optigpu.db'}") as opened:
        yield opened


@pytest.fixture(scope="session")
def postgresql_database(postgres_server_url: str) -> Iterator[Database]:
    """A migrated PostgreSQL database that the session's tests share."""
    with fresh_database(postgres_server_url) as url, migrated(url) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Database:
    """A database with empty tables; the test runs once on each engine."""
    opened: Database = request.getfixturevalue(f"{request.param}_database")
    empty(opened)
    return opened
