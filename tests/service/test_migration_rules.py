"""What each new migration must keep: the version before it goes on working while the tables are those of the next.

The rule holds for the newest migration. It only adds: what it removes, it may remove one version later, when no program
uses it any more. docs/service.md promises it.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, Inspector, MetaData, func, inspect, null, select, text

import migrations
from optigpu.documents.queries import LeaderboardQuery
from optigpu.store import leaderboard
from optigpu.store.database import Database, engine_for
from tests.breadth import cases
from tests.service.records import fill, fill_devices
from tests.service.serving import MATMUL, serving

REVISIONS = [script.revision for script in ScriptDirectory(str(migrations.FOLDER)).walk_revisions()]
"""Of every migration, the newest first."""
HEAD, BEFORE = REVISIONS[:2]
ADVICE = (
    f"migration {HEAD} takes something away that the version of {BEFORE} uses; let it only add, and remove in a later "
    "migration"
)
ON_SQLITE_BY_DEFAULT = pytest.mark.parametrize(
    "database_url", cases(["sqlite", "postgresql"], 1), indirect=True
)


@dataclass(frozen=True)
class Shape:
    """What a table asks of a row: which columns with which types, which may be left out, what must be unique."""

    types: dict[str, str]
    may_be_left_out: frozenset[str]
    unique: frozenset[tuple[str, ...]]
    checked: frozenset[str]


@contextmanager
def opened(url: str) -> Iterator[Engine]:
    engine = engine_for(url)
    yield engine
    engine.dispose()


def shapes(url: str) -> dict[str, Shape]:
    with opened(url) as engine:
        seen = inspect(engine)
        return {name: shape(seen, name) for name in seen.get_table_names()}


def shape(seen: Inspector, table: str) -> Shape:
    columns = seen.get_columns(table)
    unique: list[list[str | None]] = [[*seen.get_pk_constraint(table)["constrained_columns"]]]
    unique += [[*each["column_names"]] for each in seen.get_unique_constraints(table)]
    unique += [each["column_names"] for each in seen.get_indexes(table) if each["unique"]]
    links = [
        f"{each['constrained_columns']} to {each['referred_table']}" for each in seen.get_foreign_keys(table)
    ]
    return Shape(
        types={column["name"]: str(column["type"]) for column in columns},
        may_be_left_out=frozenset(
            column["name"] for column in columns if column["nullable"] or column["default"] is not None
        ),
        unique=frozenset(tuple(sorted(str(name) for name in names)) for names in unique),
        checked=frozenset([*links, *(str(each["sqltext"]) for each in seen.get_check_constraints(table))]),
    )


@pytest.mark.slow
def test_the_newest_migration_only_adds(database_url: str) -> None:
    migrations.upgrade(database_url, BEFORE)
    before = shapes(database_url)
    migrations.upgrade(database_url)
    after = shapes(database_url)
    assert set(before) <= set(after), ADVICE
    for name, old in before.items():
        new = after[name]
        assert old.types.items() <= new.types.items(), f"{name}: {ADVICE}"
        assert old.may_be_left_out <= new.may_be_left_out, f"{name}: {ADVICE}"
        assert set(new.types) - set(old.types) <= new.may_be_left_out, (
            f"{name}: a new column is nullable or has a server default, since {BEFORE} does not write it"
        )
        assert new.unique <= old.unique, f"{name}: {BEFORE} may write what is no longer unique"
        assert new.checked <= old.checked, f"{name}: {BEFORE} may write what a new check refuses"


@pytest.mark.slow
def test_what_the_version_before_writes_is_still_accepted(database_url: str) -> None:
    """Its rows, by its own columns, into the tables of the newest migration."""
    migrations.upgrade(database_url)
    fill(database_url)
    with closing(Database(database_url)) as database:
        fill_devices(database)
    migrations.downgrade(database_url, BEFORE)
    tables, rows = everything(database_url)
    assert sum(len(found) for found in rows.values()) >= 15
    with opened(database_url) as engine, engine.begin() as connection:
        for table in reversed(tables.sorted_tables):
            connection.execute(table.delete())
    migrations.upgrade(database_url)
    with opened(database_url) as engine, engine.begin() as connection:
        for table in tables.sorted_tables:
            for row in rows[table.name]:
                connection.execute(table.insert().values(row))
        counts = {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in tables.sorted_tables
        }
    assert counts == {name: len(found) for name, found in rows.items()}


def everything(url: str) -> tuple[MetaData, dict[str, list[dict[str, Any]]]]:
    """The tables as they are, and all of their rows."""
    tables = MetaData()
    with opened(url) as engine, engine.begin() as connection:
        tables.reflect(connection)
        tables.remove(tables.tables["alembic_version"])
        rows = {
            table.name: [
                {name: null() if value is None else value for name, value in row.items()}
                for row in connection.execute(table.select()).mappings()
            ]
            for table in tables.sorted_tables
        }
    return tables, rows


@ON_SQLITE_BY_DEFAULT
@pytest.mark.slow
def test_each_step_down_and_up_keeps_the_jobs_and_the_leaderboard(database_url: str) -> None:
    migrations.upgrade(database_url)
    fill(database_url)
    before = board(database_url)
    for revision in REVISIONS[1:]:
        migrations.downgrade(database_url, revision)
        assert stored(database_url) == (1, 1, 1), revision
    for revision in reversed(REVISIONS[:-1]):
        migrations.upgrade(database_url, revision)
        assert stored(database_url) == (1, 1, 1), revision
    assert board(database_url) == before


def stored(url: str) -> tuple[int, ...]:
    """How many jobs and results there are."""
    with opened(url) as engine, engine.begin() as connection:
        return tuple(
            connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
            for table in ("jobs", "results", "samples")
        )


def board(url: str) -> list[tuple[str, int | None, float | None]]:
    with closing(Database(url)) as database, database.read() as session:
        boards = leaderboard.query(session, LeaderboardQuery()).boards
    return [(row.result_id, row.rank, row.value.value) for board in boards for row in board.rows]


@pytest.mark.slow
def test_a_service_goes_on_with_the_tables_of_the_next_version_and_not_with_later_ones(
    database_url: str,
) -> None:
    with serving(database_url) as served:
        with served.database.write() as session:
            session.execute(
                text("ALTER TABLE jobs ADD COLUMN of_the_next_version TEXT DEFAULT 'new' NOT NULL")
            )
            session.execute(text("UPDATE alembic_version SET version_num = :next"), {"next": numbered(1)})
        assert served.client.get("/readyz").status_code == 200
        assert migrations.lacking(database_url) is None
        migrations.upgrade(database_url)
        assert migrations.current(database_url) == numbered(1), "the older version leaves them as they are"
        job = served.submit(MATMUL)
        served.finish(served.claim())
        assert served.client.get(f"/v1/jobs/{job['id']}").json()["state"] == "succeeded"
        with served.database.write() as session:
            session.execute(text("UPDATE alembic_version SET version_num = :next"), {"next": numbered(2)})
        assert "update OptiGPU" in reason(served.client)


def numbered(later: int) -> str:
    """The revision that is so many versions ahead."""
    return f"{int(HEAD) + later:04d}"


def reason(client: httpx.Client) -> str:
    answer = client.get("/readyz")
    assert answer.status_code == 503
    (entry,) = answer.json()["errors"]
    return str(entry["message"])
