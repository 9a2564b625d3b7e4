"""What the benchmarks fill a database with is what the service would have stored."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
from sqlalchemy import inspect, select

import migrations
from benchmarks.made_up import draw, measured_at, result_id
from benchmarks.many_results import fill
from optigpu.store import results, standings
from optigpu.store.database import Database
from optigpu.store.tables import (
    Base,
    BoardRow,
    EntryTechnique,
    EnvironmentRow,
    KnownName,
    LeaderboardEntry,
    MetricRow,
    ResultRow,
)
from tests.servers.postgres import fresh_database, libpq

CONFIGURATIONS, ROUNDS = 60, 3
TABLES = (BoardRow, EntryTechnique, EnvironmentRow, KnownName, LeaderboardEntry, MetricRow, ResultRow)


def test_a_filled_database_has_the_rows_that_the_service_stores(postgres_server_url: str) -> None:
    with migrated(postgres_server_url) as filled, migrated(postgres_server_url) as stored:
        fill(libpq(filled), CONFIGURATIONS, ROUNDS * CONFIGURATIONS, seed=3)
        store(stored)
        assert indexes(filled) == indexes(stored)
        for table in TABLES:
            assert rows(filled, table) == rows(stored, table), table.__tablename__


def store(url: str) -> None:
    """One result after the other, as the service takes them."""
    drawn = list(draw(CONFIGURATIONS, seed=3))
    with closing(Database(url)) as database, database.write() as session:
        for round_ in range(ROUNDS):
            for each in drawn:
                at = measured_at(round_, each.number, CONFIGURATIONS)
                result = each.result(result_id(round_, each.number), at)
                results.add(session, result, {})
                standings.enter(session, result)


def rows(url: str, table: type[Base]) -> list[tuple[Any, ...]]:
    """All of them, in the order of their keys; documents of results are left out."""
    columns = [column for column in inspect(table).columns if (table, column.key) != (ResultRow, "document")]
    with closing(Database(url)) as database, database.read() as session:
        found = session.execute(select(*columns).order_by(*inspect(table).primary_key))
        return [tuple(row) for row in found]


def indexes(url: str) -> list[tuple[str, bool]]:
    """Indexes, and keys with what they refer to."""
    statement = (
        "SELECT indexdef, true FROM pg_indexes WHERE schemaname = 'public' UNION ALL SELECT conname || ' ' || "
        "pg_get_constraintdef(oid), convalidated FROM pg_constraint WHERE contype IN ('p', 'f') ORDER BY 1"
    )
    with psycopg.connect(libpq(url)) as connection:
        return connection.execute(statement).fetchall()


@contextmanager
def migrated(server_url: str) -> Iterator[str]:
    with fresh_database(server_url) as url:
        migrations.upgrade(url)
        yield url
