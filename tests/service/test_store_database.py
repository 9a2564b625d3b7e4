"""A read session sees one state, whatever others commit meanwhile; on both databases."""

from concurrent.futures import ThreadPoolExecutor

import psycopg
from sqlalchemy import text

from optigpu.store import jobs, queue
from optigpu.store.database import Database
from optigpu.vocabulary import JobState
from tests.service.records import a_spec


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


def test_a_session_that_reads_leaves_its_statements_prepared(postgresql_database: Database) -> None:
    """So that PostgreSQL plans a page's statements once for each connection, and not for each reader."""
    for _ in range(6):
        with postgresql_database.read() as session:
            queue.counts(session)
    with postgresql_database.read() as session:
        assert session.scalar(text("SELECT count(*) FROM pg_prepared_statements")) > 0


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
