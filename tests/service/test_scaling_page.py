"""The SQL of docs/scaling.md does what the page says, on a database that holds results."""

import re
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from sqlalchemy import text

import migrations
from optigpu.store import results
from optigpu.store.database import Database
from tests.pages import ROOT
from tests.servers.postgres import fresh_database, libpq
from tests.service.records import a_metric, a_result

BLOCKS = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "scaling.md").read_text(), re.DOTALL)
EARLY, LATE = "019d0000-0000-7000-8000-000000000001", "019f1af9-b400-7000-8000-000000000001"


@pytest.fixture
def url(postgres_server_url: str) -> Iterator[str]:
    """A migrated database of the test's own, since its tables change."""
    with fresh_database(postgres_server_url) as made:
        migrations.upgrade(made)
        yield made


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with closing(Database(url)) as opened:
        yield opened


def stored(database: Database, result_id: str) -> None:
    """A result with samples under that id."""
    result = a_result({"tflops": a_metric("tflops", 1.0)}, workload="matmul")
    with database.write() as session:
        results.add(session, result.model_copy(update={"id": result_id}), {"tflops": ((1.0, 2.0),)})


def by_table(database: Database) -> dict[str, int]:
    """How many samples lie in each table."""
    query = "SELECT tableoid::regclass::text, count(*) FROM samples GROUP BY 1"
    with database.read() as session:
        return {row[0]: row[1] for row in session.execute(text(query))}


def test_samples_are_divided_by_month_and_go_with_their_result(url: str, database: Database) -> None:
    stored(database, EARLY)
    run(url, BLOCKS[0])
    stored(database, LATE)
    assert by_table(database) == {"samples_before": 1, "samples_2026_07": 1}
    with database.read() as session:
        found = results.samples(session, LATE)
    assert found.samples["tflops"] == ((1.0, 2.0),)
    run(url, f"DELETE FROM results WHERE id = '{EARLY}'")
    assert by_table(database) == {"samples_2026_07": 1}
    run(url, "ALTER TABLE samples DETACH PARTITION samples_2026_07")
    assert by_table(database) == {}


def test_the_first_id_of_a_month_follows_from_its_first_moment(database: Database) -> None:
    with database.read() as session:
        (found,) = session.execute(text(BLOCKS[1].rstrip().rstrip(";"))).scalars()
    assert found in BLOCKS[0]


def run(url: str, sql: str) -> None:
    """As `psql` would."""
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        connection.execute(sql)
