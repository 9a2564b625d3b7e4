"""The databases: what goes in comes out as it was, a reader sees one state, servers' addresses, and tables by month.
And backup and restore by `python -m api`, with data."""

import math
import os
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from dotenv import dotenv_values
from kombu.connection import Connection
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

import migrations
from api.__main__ import main
from optigpu.documents.queries import LeaderboardQuery
from optigpu.store import jobs, leaderboard, queue, results
from optigpu.store.database import Database, StoreUnavailableError, default_url, engine_for
from optigpu.store.tables import Attempt, EnvironmentRow, Job
from optigpu.store.workers import broker_url
from optigpu.vocabulary import DocumentError, JobState, StoreError
from tests.pages import ROOT, SERVICE, blocks
from tests.servers.databases import fresh_database, libpq
from tests.servers.process import this_machine
from tests.service.records import NOON, a_metric, a_result, a_spec, fill

pytestmark = pytest.mark.slow

DOCUMENTS = [
    {"z": 1, "a": {"nested": [1, 2.5, None, True, "ü 🚀"]}},
    {"tiny": 5e-324, "large": 1.7976931348623157e308, "third": 1 / 3, "negative_zero": -0.0},
    {"int": 2**63 - 1, "empty": {}, "list": []},
]
EXAMPLE = dotenv_values(ROOT / ".env.worker.example")
CERTIFICATE = "/etc/optigpu/certificates/ca.crt"
BLOCKS = blocks(SERVICE, "sql")
EARLY, LATE = "019d0000-0000-7000-8000-000000000001", "019f1af9-b400-7000-8000-000000000001"


def _submitted(database: Database) -> str:
    with database.write() as session:
        return jobs.submit(session, a_spec()).job.id


def test_a_read_session_sees_one_state_whatever_is_committed_meanwhile(database: Database) -> None:
    first = _submitted(database)
    with database.read() as session:
        before = queue.counts(session)
        with database.write() as writing:
            jobs.submit(writing, a_spec())
            jobs.request_cancel(writing, first)
        assert queue.counts(session) == before
        assert [job.id for job in jobs.list_(session).jobs] == [first]
    with database.read() as session:
        assert queue.counts(session)[JobState.CANCELLED] == 1
        assert len(jobs.list_(session).jobs) == 2


def test_reads_beside_writers_never_fail(database: Database) -> None:
    """A snapshot that only reads has nothing to be serialized with, so nothing has to be tried again."""

    def read(_: int) -> bool:
        with database.read() as session:
            return sum(queue.counts(session).values()) == len(jobs.list_(session, limit=1000).jobs)

    with ThreadPoolExecutor(4) as pool:
        written = pool.map(lambda _: _submitted(database), range(40))
        consistent = list(pool.map(read, range(40)))
        assert len(set(written)) == 40
    assert all(consistent)


def test_a_write_after_a_read_on_the_same_connection_sees_what_others_committed(database: Database) -> None:
    """The isolation of a read must not stay with the pooled connection: a claim relies on READ COMMITTED."""
    for _ in range(3):
        with database.read() as session:
            queue.counts(session)
        with database.write() as session:
            before = queue.counts(session)[JobState.QUEUED]
            _in_another_thread(database) if database.dialect == "postgresql" else jobs.submit(
                session, a_spec()
            )
            assert queue.counts(session)[JobState.QUEUED] == before + 1


def _in_another_thread(database: Database) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_submitted, database).result()


def test_connections_that_the_server_has_closed_are_replaced(postgresql_database: Database) -> None:
    """As a restart of the server leaves them; nobody who asks afterwards sees it."""
    with postgresql_database.read() as one, postgresql_database.read() as two:
        for session in (one, two):
            queue.counts(session)
        url = one.connection().engine.url.set(drivername="postgresql")
    with psycopg.connect(url.render_as_string(hide_password=False)) as other:
        ended = other.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
    assert len(ended) >= 2
    for _ in range(3):
        with postgresql_database.read() as session:
            queue.counts(session)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_comes_back_with_its_numbers_and_the_order_of_its_keys(
    database: Database, document: dict[str, Any]
) -> None:
    with database.write() as session:
        session.add(EnvironmentRow(digest="0" * 64, document=document))
    with database.read() as session:
        stored = session.scalars(select(EnvironmentRow.document)).one()
    assert repr(stored) == repr(document)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "a\x00b", "\ud800"])
def test_a_document_that_one_database_would_not_take_is_refused_by_both(
    database: Database, value: Any
) -> None:
    with pytest.raises(DocumentError, match="value"), database.write() as session:
        session.add(EnvironmentRow(digest="0" * 64, document={"value": [value]}))
    with database.read() as session:
        assert session.scalars(select(EnvironmentRow)).all() == []


def test_a_moment_comes_back_aware_and_in_utc(database: Database) -> None:
    summer = timezone(timedelta(hours=2))
    with database.write() as session:
        job = jobs.submit(session, a_spec()).job
        session.get_one(Job, job.id).started_at = datetime(2026, 7, 1, 14, 30, 0, 123456, tzinfo=summer)
    with database.read() as session:
        started_at = jobs.get(session, job.id).started_at
    assert started_at == datetime(2026, 7, 1, 12, 30, 0, 123456, tzinfo=UTC)
    assert started_at.tzinfo is UTC


def test_foreign_keys_are_enforced(database: Database) -> None:
    attempt = {"number": 1, "worker_id": "w", "host_id": "h", "version": "1", "started_at": NOON}
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(Attempt(job_id="no such job", **attempt))


def test_a_database_without_tables_says_what_to_do(database_url: str) -> None:
    database = Database(database_url)
    with pytest.raises(StoreUnavailableError, match="alembic upgrade head"), database.read() as session:
        jobs.list_(session)
    database.close()


def test_a_database_that_is_away_says_so_and_hides_the_password() -> None:
    database = Database("postgresql://optigpu:secret@127.0.0.1:1/none")
    with pytest.raises(StoreUnavailableError, match="cannot be used") as refused:
        database.ping()
    assert "secret" not in str(refused.value)
    assert str(refused.value).endswith(" Check that it runs, and its address in OPTIGPU_DATABASE_URL.")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://root@localhost/x", "nonsense"])
def test_a_url_that_cannot_serve_is_refused_with_a_sentence(url: str) -> None:
    with pytest.raises(StoreError, match="use sqlite:///PATH"):
        Database(url)


def test_the_default_database_makes_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "50% of it" / "new"
    database = Database(default_url(folder))
    database.ping()
    database.close()
    assert (folder / "optigpu.db").is_file()


def test_the_example_of_redis_checks_the_server_for_celery_and_for_redis() -> None:
    address = str(EXAMPLE["OPTIGPU_REDIS_URL"])
    with Connection(broker_url(address)) as broker:
        assert broker.ssl == {
            "ssl_cert_reqs": ssl.CERT_REQUIRED,
            "ssl_check_hostname": True,
            "ssl_ca_certs": CERTIFICATE,
        }
        assert (broker.password, broker.hostname, broker.port) == ("PASSWORD", "redis.example.org", 6379)
    with redis.Redis.from_url(address) as client:
        pool = client.connection_pool
        assert pool.connection_class is redis.SSLConnection
        assert pool.connection_kwargs["ssl_ca_certs"] == CERTIFICATE
        assert pool.connection_kwargs["password"] == "PASSWORD"
        assert pool.make_connection().check_hostname


def test_the_example_of_postgresql_checks_the_server() -> None:
    engine = engine_for(str(EXAMPLE["OPTIGPU_DATABASE_URL"]))
    _, options = engine.dialect.create_connect_args(engine.url)
    assert (options["sslmode"], options["sslrootcert"]) == ("verify-full", CERTIFICATE)
    assert (options["host"], options["password"]) == ("db.example.org", "PASSWORD")


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("redis://host/0", "redis://host/0"),
        ("rediss://host/0", "rediss://host/0?ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_ca_certs=/ca", "rediss://host/0?ssl_ca_certs=/ca&ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_cert_reqs=none", "rediss://host/0?ssl_cert_reqs=none"),
    ],
)
def test_tls_checks_the_certificate_unless_the_address_says_otherwise(address: str, asked: str) -> None:
    assert broker_url(address) == asked
    with Connection(broker_url(address)) as broker:
        checked = (broker.ssl or {}).get("ssl_cert_reqs")
    assert checked == (
        ssl.CERT_REQUIRED if "required" in asked else ssl.CERT_NONE if "none" in asked else None
    )


@pytest.fixture
def own_url(postgres_server_url: str) -> Iterator[str]:
    """A migrated database of the test's own, since its tables change."""
    with fresh_database(postgres_server_url) as made:
        migrations.upgrade(made)
        yield made


@pytest.fixture
def own_database(own_url: str) -> Iterator[Database]:
    with closing(Database(own_url)) as opened:
        yield opened


def enter_under(own_database: Database, result_id: str) -> None:
    """A result with samples under that id."""
    result = a_result({"tflops": a_metric("tflops", 1.0)}, workload="matmul")
    with own_database.write() as session:
        results.add(session, result.model_copy(update={"id": result_id}), {"tflops": ((1.0, 2.0),)})


def by_table(own_database: Database) -> dict[str, int]:
    """How many samples lie in each table."""
    query = "SELECT tableoid::regclass::text, count(*) FROM samples GROUP BY 1"
    with own_database.read() as session:
        return {row[0]: row[1] for row in session.execute(text(query))}


def test_samples_are_divided_by_month_and_go_with_their_result(own_url: str, own_database: Database) -> None:
    enter_under(own_database, EARLY)
    run(own_url, BLOCKS[0])
    enter_under(own_database, LATE)
    assert by_table(own_database) == {"samples_before": 1, "samples_2026_07": 1}
    with own_database.read() as session:
        found = results.samples(session, LATE)
    assert found.samples["tflops"] == ((1.0, 2.0),)
    run(own_url, f"DELETE FROM results WHERE id = '{EARLY}'")
    assert by_table(own_database) == {"samples_2026_07": 1}
    run(own_url, "ALTER TABLE samples DETACH PARTITION samples_2026_07")
    assert by_table(own_database) == {}


def run(own_url: str, sql: str) -> None:
    """As `psql` would."""
    with psycopg.connect(libpq(own_url), autocommit=True) as connection:
        connection.execute(sql)


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs `python -m api ...` on the test's database: the exit status, and what it says."""
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", database_url)
    if pg_dump := this_machine().program("pg_dump"):
        monkeypatch.setenv("PATH", f"{Path(pg_dump).parent}{os.pathsep}{os.environ['PATH']}")

    def run(*arguments: str | Path) -> tuple[int, str]:
        status = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def seen(url: str) -> Any:
    """What readers see: the leaderboard, the jobs, and each result with its samples."""
    with closing(Database(url)) as database, database.read() as session:
        boards = leaderboard.query(session, LeaderboardQuery()).boards
        listed = jobs.list_(session).jobs
        of_jobs = [result for job in listed for result in results.of_job(session, job.id)]
        samples = [results.samples(session, result["id"]) for result in of_jobs]
    return boards, listed, of_jobs, samples


def submit(url: str) -> None:
    with closing(Database(url)) as database, database.write() as session:
        jobs.submit(session, a_spec())


def test_a_backup_of_an_older_version_is_brought_up_to_date(
    database_url: str, command: Command, tmp_path: Path
) -> None:
    migrations.upgrade(database_url)
    fill(database_url)
    before = seen(database_url)
    migrations.downgrade(database_url, "0008")
    assert command("backup", tmp_path / "backup")[0] == 0
    migrations.downgrade(database_url, "base")
    assert command("restore", tmp_path / "backup")[0] == 0
    assert migrations.lacking(database_url) is None
    assert seen(database_url) == before


def test_a_database_with_data_is_replaced_only_on_request(
    database_url: str, command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "backup"
    migrations.upgrade(database_url)
    fill(database_url)
    before = seen(database_url)
    assert command("backup", file)[0] == 0
    submit(database_url)
    status, said = command("restore", file)
    assert (status, "--replace" in said) == (1, True)
    assert len(seen(database_url)[1]) == 2
    assert command("restore", file, "--replace")[0] == 0
    assert seen(database_url) == before


def test_what_cannot_be_done_is_said_and_changes_nothing(
    database_url: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_bytes(b"no backup" * 1000)
    migrations.upgrade(database_url)
    fill(database_url)
    before = seen(database_url)
    for file in (nonsense, tmp_path / "none"):
        status, said = command("restore", file, "--replace")
        assert (status, said.count("\n")) == (1, 1), said
    assert command("backup", nonsense) == (1, f"{nonsense} exists already; name another file.\n")
    assert command("backup", tmp_path / "no" / "folder")[0] == 1
    with closing(Database(database_url)) as database, database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert command("backup", tmp_path / "later")[0] == 0
    status, said = command("restore", tmp_path / "later", "--replace")
    assert (status, "revision 9999 is unknown" in said) == (1, True), said
    assert seen(database_url) == before
