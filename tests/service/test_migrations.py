"""Migrations: up, down and up again with data, on both databases, from anywhere, by two at once."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Text, cast, inspect, select, text
from sqlalchemy.orm import Session

import migrations
from optigpu.documents.devices import Reason
from optigpu.documents.queries import LeaderboardQuery
from optigpu.store import events, jobs, keys, launches, leaderboard, leases, outcomes, results, workers
from optigpu.store.database import Database, default_url, engine_for
from optigpu.store.tables import Base, EdgeStanding, JobEvent, ResultRow
from optigpu.vocabulary import DeviceKind, FailureKind, JobState, Scheduler, StoreError
from tests.breadth import cases
from tests.service.records import (
    NOON,
    a_device,
    a_metric,
    a_report,
    a_result,
    a_spec,
    a_worker,
    an_outcome,
    claimed,
    enter,
    fill,
    planned,
    stored,
)

ROOT = Path(migrations.__file__).parents[1]


@pytest.mark.slow
def test_up_down_and_up_again_with_data(database_url: str) -> None:
    for _ in range(2):
        migrations.upgrade(database_url)
        assert migrations.lacking(database_url) is None
        assert _tables(database_url) == {*Base.metadata.tables, "alembic_version"}
        fill(database_url)
        migrations.downgrade(database_url, "base")
        assert migrations.current(database_url) is None
        assert _tables(database_url) == {"alembic_version"}


@contextmanager
def down_and_up(url: str, revision: str) -> Iterator[Session]:
    """What is written is taken down to an older revision, and up again."""
    migrations.upgrade(url)
    with closing(Database(url)) as database, database.write() as session:
        yield session
    migrations.downgrade(url, revision)
    migrations.upgrade(url)


@contextmanager
def reading(url: str) -> Iterator[Session]:
    with closing(Database(url)) as database, database.read() as session:
        yield session


@pytest.mark.long
def test_attempts_of_before_know_no_device_and_the_next_begins_anew(database_url: str) -> None:
    with down_and_up(database_url, "0002") as session:
        lease = planned(session, "baseline")
        outcomes.save_outcome(session, lease, an_outcome(a_result()))
    with closing(Database(database_url)) as database, database.write() as session:
        assert [attempt.worker_id for attempt in jobs.get(session, lease.job_id).attempts] == ["worker-1"]
        leases.release(session, lease)
        again = claimed(session)
    assert (again.attempt, again.done) == (2, ())


@pytest.mark.long
def test_metrics_of_before_lose_the_bounds_that_no_interval_gave_them(database_url: str) -> None:
    metrics = {
        "tokens_per_s": a_metric("tokens_per_s", 9.0),
        "ttft_s": a_metric("ttft_s", 1.0, (0.5, 1.5)),
        "weight_bytes": a_metric("weight_bytes", 3.0),
    }
    with down_and_up(database_url, "0004") as session:
        results.add(session, a_result(metrics), {})
    with reading(database_url) as session:
        lows = {row.name: row.low for row in session.execute(text("SELECT name, low FROM metrics"))}
    assert lows == {"tokens_per_s": None, "ttft_s": 0.5, "weight_bytes": 3.0}


@pytest.mark.long
def test_results_of_before_can_be_filtered(database_url: str) -> None:
    good = a_result(
        {"tokens_per_s": a_metric("tokens_per_s", 9.0), "top1_agreement": a_metric("top1_agreement", 0.9)}
    )
    unknown = a_result({"tokens_per_s": a_metric("tokens_per_s", 8.0)}, stack=("bf16", "fp16"))
    with down_and_up(database_url, "0013") as session:
        enter(session, good, unknown)
    with reading(database_url) as session:
        (board,) = leaderboard.query(session, LeaderboardQuery(min_top1=0.9)).boards
        assert [row.result_id for row in board.rows] == [good.id]
        assert not leaderboard.query(session, LeaderboardQuery(min_top1=0.91)).boards
        for filters in ({"technique": "bf16"}, {"technique": "fp16", "backend": "torch"}):
            (board,) = leaderboard.query(session, LeaderboardQuery(**filters)).boards
            assert [row.result_id for row in board.rows] == [unknown.id]


@pytest.mark.long
def test_a_leaderboard_of_before_gets_its_history_and_gives_the_newest_back(database_url: str) -> None:
    """Before, the newest valid result of a place was on the leaderboard, and nothing was known of the others."""
    careful: dict[str, Any] = {"warnings": (), "replicates": 5}
    made = [
        a_result(measured_at=NOON, **careful),
        a_result(measured_at=NOON + timedelta(hours=1)),
        a_result(measured_at=NOON + timedelta(hours=2), valid=False),
        a_result({"tpot_s": a_metric("tpot_s", 2.0)}, stack=("bf16",), device=DeviceKind.CUDA),
    ]
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.write() as session:
        enter(session, *made)
    today = _board_of(database_url)
    assert [(row["result_id"], row["standing"]) for row in today] == [
        (made[0].id, "current"),
        (made[1].id, "earlier"),
        (made[2].id, "invalid"),
        (made[3].id, "current"),
    ]
    migrations.downgrade(database_url, "0005")
    assert [row["result_id"] for row in _board_of(database_url)] == [made[1].id, made[3].id]
    migrations.upgrade(database_url)
    assert _board_of(database_url) == today


@pytest.mark.long
def test_reports_of_before_stand_on_the_edge_leaderboard_the_newest_of_each_place(database_url: str) -> None:
    with down_and_up(database_url, "0009") as session:
        device_id = a_device(session)
        stored(session, device_id, a_report(windows=10, sequence=1))
        newest = stored(session, device_id, a_report(windows=5, sequence=2))
        hidden = stored(session, device_id, a_report(sequence=3), Reason.GOLDEN_FAILED)
    with reading(database_url) as session:
        standing = {row.ranked: row.report_id for row in session.scalars(select(EdgeStanding))}
    assert standing == {True: newest, False: hidden}


@pytest.mark.long
def test_what_jobs_need_is_known_of_those_that_have_not_ended(database_url: str) -> None:
    """Workers of before say nothing of packages and models until they start again."""
    generate = {"workload": {"kind": "generate"}}
    needs = text("SELECT job_id, kind, name FROM job_needs ORDER BY job_id, kind")
    with down_and_up(database_url, "0006") as session:
        workers.register(
            session, a_worker(packages=("bitsandbytes",), models=("path:mine",), downloads=False)
        )
        ended = jobs.submit(session, a_spec(**generate, model="path:mine")).job.id
        jobs.request_cancel(session, ended)
        for model in ("bundled:tiny", "path:mine", "hub:nobody/tiny"):
            jobs.submit(session, a_spec(**generate, model=model))
        today = session.execute(needs).all()
    with reading(database_url) as session:
        assert session.execute(needs).all() == [need for need in today if need[0] != ended]
        (worker,) = workers.list_(session)
    assert (worker.packages, worker.models, worker.downloads) == ((), (), True)


@pytest.mark.long
def test_keys_that_expire_are_revoked_by_tables_that_know_no_end(database_url: str) -> None:
    """So that none lives for ever."""
    with down_and_up(database_url, "0010") as session:
        keys.create(session, "with an end", ["read"], timedelta(days=1))
        keys.create(session, "without", ["read"])
    with reading(database_url) as session:
        assert [(key.name, key.expires_at) for key in keys.list_(session)] == [("without", None)]


@pytest.mark.long
def test_jobs_that_wait_for_a_scheduler_are_cancelled_by_tables_that_know_none(database_url: str) -> None:
    with down_and_up(database_url, "0013") as session:
        waits, failed = (jobs.submit(session, a_spec(via="slurm")).job.id for _ in range(2))
        usual = jobs.submit(session, a_spec()).job.id
        for _ in range(2):
            begun = launches.begin(session, Scheduler.SLURM)
            assert begun is not None
            if begun.job_id == failed:
                launches.end(session, begun.id, "It ended.")
    with reading(database_url) as session:
        found = [jobs.get(session, job_id) for job_id in (waits, failed, usual)]
    assert [job.state for job in found] == [JobState.CANCELLED, JobState.CANCELLED, JobState.QUEUED]
    assert [job.failure for job in found] == [None, FailureKind.LOST, None]
    assert str(found[0].reason).endswith("post it again.")


def _board_of(url: str) -> list[dict[str, Any]]:
    with closing(Database(url)) as database, database.read() as session:
        found = session.execute(text("SELECT * FROM leaderboard ORDER BY result_id")).mappings()
        return [{name: _plain(value) for name, value in row.items()} for row in found]


def _plain(value: Any) -> Any:
    """A document as it was stored: SQLite gives its text."""
    return json.loads(value) if isinstance(value, str) and value[:1] == "{" else value


@pytest.mark.long
def test_progress_that_has_accumulated_is_removed_but_for_the_newest(database_url: str) -> None:
    migrations.upgrade(database_url, "0003")
    _execute(database_url, _JOB)
    for sequence, kind in enumerate(("state", "progressed", "planned", "progressed", "progressed"), start=1):
        _execute(
            database_url,
            f"INSERT INTO job_events VALUES ('a', {sequence}, '2026-01-01 00:00:00', '{kind}', '{{}}')",
        )
    migrations.upgrade(database_url)
    with reading(database_url) as session:
        found = [(event.sequence, event.kind) for event in events.after(session, "a", 0)]
    assert found == [(1, "state"), (3, "planned"), (5, "progressed")]


@pytest.mark.slow
def test_events_of_before_hold_their_results_and_those_of_today_name_them(database_url: str) -> None:
    migrations.upgrade(database_url)
    fill(database_url)
    with reading(database_url) as session:
        job_id = session.scalars(select(ResultRow.job_id)).one()
        assert job_id is not None
        today, stored = events.after(session, job_id, 0), _data_of(session, "variant_finished")
        assert "metrics" not in stored
    migrations.downgrade(database_url, "0020")
    with reading(database_url) as session:
        whole = [each.data for each in today if each.kind == "variant_finished"]
        assert [json.loads(_data_of(session, "variant_finished"))] == whole
    migrations.upgrade(database_url)
    with reading(database_url) as session:
        assert events.after(session, job_id, 0) == today
        assert json.loads(_data_of(session, "variant_finished")) == json.loads(stored)


def _data_of(session: Session, kind: str) -> str:
    as_text = cast(JobEvent.data, Text)
    return session.scalars(select(as_text).where(JobEvent.kind == kind)).one()


_JOB = """
    INSERT INTO jobs (id, state, created_at, schema_version, spec, workload, plan, backend, device, min_vram_bytes,
                      spec_digest, fencing, attempt, last_sequence, progress)
    VALUES ('a', 'running', '2026-01-01 00:00:00', 1, '{}', 'matmul', 'single', 'torch', 'cpu', 0, 'd', 1, 1, 5, '{}')
"""


@pytest.mark.slow
def test_the_tables_are_those_of_the_migrations_and_a_difference_is_found(database_url: str) -> None:
    migrations.upgrade(database_url)
    migrations.check(database_url)
    _execute(database_url, "ALTER TABLE workers DROP COLUMN version")
    with pytest.raises(StoreError, match=r"(?s)workers.*Write a migration"):
        migrations.check(database_url)


def test_nothing_is_left_of_a_migration_that_fails(database_url: str) -> None:
    _execute(database_url, "CREATE TABLE variants (id INTEGER)")
    with pytest.raises(StoreError, match="variants"):
        migrations.upgrade(database_url)
    assert _tables(database_url) <= {"variants", "alembic_version"}
    assert migrations.current(database_url) is None


@pytest.mark.parametrize("database_url", cases(["postgresql", "sqlite"], 1), indirect=True)
@pytest.mark.slow
def test_two_processes_may_upgrade_at_once(database_url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_upgrade_in_a_process, [database_url] * 2))
    assert migrations.lacking(database_url) is None


@pytest.mark.slow
def test_the_command_line_migrates_the_default_file_and_checks_it(tmp_path: Path) -> None:
    default = {"OPTIGPU_DATABASE_URL": "", "OPTIGPU_DATA_DIR": str(tmp_path / "data")}
    _alembic(default, "upgrade", "head")
    assert migrations.lacking(default_url(tmp_path / "data")) is None
    _alembic(default, "check")


def _tables(url: str) -> set[str]:
    engine = engine_for(url)
    found = set(inspect(engine).get_table_names())
    engine.dispose()
    return found


def _execute(url: str, statement: str) -> None:
    engine = engine_for(url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def _upgrade_in_a_process(url: str) -> None:
    command = [sys.executable, "-c", "import sys, migrations; migrations.upgrade(sys.argv[1])", url]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


def _alembic(environment: dict[str, str], *arguments: str) -> None:
    command = [sys.executable, "-m", "alembic", *arguments]
    subprocess.run(
        command, cwd=ROOT, check=True, timeout=120, capture_output=True, env=os.environ | environment
    )
