"""What goes into either database comes out of it as it was, or is refused."""

import math
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from optigpu.store import jobs
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.store.database import Database, default_url
from optigpu.store.errors import CursorError, StoreUnavailableError
from optigpu.store.tables import Attempt, EnvironmentRow, Job
from optigpu.store.types import clean_text
from optigpu.vocabulary import DocumentError, StoreError
from tests.service.records import NOON, a_spec

DOCUMENTS = [
    {"z": 1, "a": {"nested": [1, 2.5, None, True, "ü 🚀"]}},
    {"tiny": 5e-324, "large": 1.7976931348623157e308, "third": 1 / 3, "negative_zero": -0.0},
    {"int": 2**63 - 1, "empty": {}, "list": []},
]


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


def test_a_naive_moment_is_refused(database: Database) -> None:
    with pytest.raises(Exception, match="no time zone"), database.write() as session:
        session.execute(select(Job).where(Job.created_at < datetime(2026, 1, 1)))


def test_text_is_kept_without_what_postgresql_cannot_hold() -> None:
    assert clean_text("killed\x00 by \ud83d\ude80 \udc00 signal 9") == "killed\ufffd by 🚀 \ufffd signal 9"


def test_foreign_keys_are_enforced(database: Database) -> None:
    attempt = {"number": 1, "worker_id": "w", "host_id": "h", "version": "1", "started_at": NOON}
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(Attempt(job_id="no such job", **attempt))


def test_a_write_that_raises_leaves_nothing(database: Database) -> None:
    def submit_and_fail() -> None:
        with database.write() as session:
            jobs.submit(session, a_spec())
            raise RuntimeError("after the insert")

    with pytest.raises(RuntimeError, match="after the insert"):
        submit_and_fail()
    with database.read() as session:
        assert jobs.list_(session).jobs == ()


def test_a_reading_session_cannot_write(database: Database) -> None:
    with pytest.raises(Exception, match=r"(?i)read-?only"), database.read() as session:
        jobs.submit(session, a_spec())


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


def test_what_keeps_a_file_from_being_used_has_its_own_advice(tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    for name, advice in (
        ("folder.db", "that this user may write there."),
        ("empty.db", "`alembic upgrade head` on it."),
    ):
        database = Database(f"sqlite:///{tmp_path / name}")
        with pytest.raises(StoreUnavailableError) as refused, database.read() as session:
            jobs.list_(session)
        assert str(refused.value).endswith(advice)
        database.close()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        StoreError, match=r"of the database, .*/file/data, cannot be made \(Not a directory\)"
    ):
        Database(default_url(tmp_path / "file" / "data"))


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


def test_sqlite_uses_a_write_ahead_log(tmp_path: Path) -> None:
    database = Database(default_url(tmp_path))
    with database.read() as session:
        assert session.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
    database.close()


def test_a_cursor_comes_back_exactly() -> None:
    position = ["2026-01-02T12:00:00+00:00", 1 / 3, 7]
    assert decode_cursor(encode_cursor(*position), str, float, int) == position


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "%",
        "ü",
        "e30",
        encode_cursor(1),
        encode_cursor("a", 1),
        encode_cursor("a", "b", "c"),
        "[" * 5000,
        encode_cursor("a\x00", "b"),
    ],
)
def test_a_foreign_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(CursorError, match="first page"):
        decode_cursor(cursor, str, str)


@pytest.mark.parametrize("number", [10**400, 2**63, math.inf, math.nan, True])
def test_a_cursor_holds_no_number_that_a_database_cannot(number: float) -> None:
    with pytest.raises(CursorError):
        decode_cursor(encode_cursor(number), (int, float))
