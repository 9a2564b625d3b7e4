"""Backup and restore by `python -m api`, with data, on both databases."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import migrations
from api.__main__ import main
from optigpu.store import jobs, leaderboard, results
from optigpu.store.database import Database
from optigpu.store.filters import LeaderboardQuery
from tests.servers.process import this_machine
from tests.service.filled import fill
from tests.service.records import a_spec

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
