"""Migrations: up, down and up again with data, on both databases, from anywhere, by two at once."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, inspect, select, text

import migrations
from optigpu.documents.administration import AuditAction, WebhookEvent
from optigpu.documents.devices import Reason
from optigpu.store import (
    artifacts,
    audit,
    devices,
    events,
    jobs,
    keys,
    launches,
    leaderboard,
    leases,
    outcomes,
    queue,
    results,
    standings,
    webhooks,
    withdrawals,
    workers,
)
from optigpu.store.audit import Actor
from optigpu.store.database import Database, default_url, engine_for
from optigpu.store.errors import StoreUnavailableError
from optigpu.store.filters import LeaderboardQuery
from optigpu.store.tables import Base, DeviceReportRow, EdgeStanding
from optigpu.store.withdrawals import Withdrawal
from optigpu.vocabulary import DeviceKind, FailureKind, JobState, NotFoundError, Scheduler, StoreError
from tests.service.edge_records import a_device, a_report, stored
from tests.service.filled import fill, fill_devices
from tests.service.records import NOON, a_metric, a_plan, a_result, a_spec, a_worker, an_outcome

ROOT = Path(migrations.__file__).parents[1]


def test_up_down_and_up_again_with_data(database_url: str) -> None:
    for _ in range(2):
        migrations.upgrade(database_url)
        assert migrations.lacking(database_url) is None
        assert _tables(database_url) == {*Base.metadata.tables, "alembic_version"}
        fill(database_url)
        migrations.downgrade(database_url, "base")
        assert migrations.current(database_url) is None
        assert _tables(database_url) == {"alembic_version"}


def test_a_database_of_before_artifacts_keeps_its_results_up_and_down(database_url: str) -> None:
    migrations.upgrade(database_url)
    fill(database_url)
    migrations.downgrade(database_url, "0001")
    assert "artifacts" not in _tables(database_url)
    migrations.upgrade(database_url)
    database = Database(database_url)
    with database.read() as session:
        (board,) = leaderboard.query(session, LeaderboardQuery()).boards
        (row,) = board.rows
        assert artifacts.list_(session, row.result_id).artifacts == ()
        assert len(results.samples(session, row.result_id).samples) == 1
    database.close()


@pytest.mark.slow
def test_attempts_of_before_know_no_device_and_the_next_begins_anew(database_url: str) -> None:
    migrations.upgrade(database_url)
    database = Database(database_url)
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = leases.claim(session, a_worker(), 30)
        assert lease is not None
        outcomes.plan(session, lease, a_plan("baseline"))
        outcomes.save_outcome(session, lease, an_outcome(a_result()))
    migrations.downgrade(database_url, "0002")
    migrations.upgrade(database_url)
    with database.write() as session:
        assert [attempt.worker_id for attempt in jobs.get(session, job_id).attempts] == ["worker-1"]
        leases.release(session, lease)
        again = leases.claim(session, a_worker(), 30)
    database.close()
    assert again is not None
    assert (again.attempt, again.done) == (2, ())


def test_metrics_of_before_lose_the_bounds_that_no_interval_gave_them(database_url: str) -> None:
    metrics = {
        "tokens_per_s": a_metric("tokens_per_s", 9.0),
        "ttft_s": a_metric("ttft_s", 1.0, (0.5, 1.5)),
        "tpot_s": a_metric("tpot_s", 2.0, (2.0, 2.0)),
        "weight_bytes": a_metric("weight_bytes", 3.0),
    }
    today = [("tokens_per_s", None), ("tpot_s", 2.0), ("ttft_s", 0.5), ("weight_bytes", 3.0)]
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.write() as session:
        results.add(session, a_result(metrics), {})
    assert _lower_bounds(database_url) == today
    migrations.downgrade(database_url, "0004")
    assert dict(_lower_bounds(database_url)) == dict(today) | {"tokens_per_s": 9.0}
    migrations.upgrade(database_url)
    assert _lower_bounds(database_url) == today


def test_results_of_before_can_be_filtered(database_url: str) -> None:
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.write() as session:
        good = a_result(
            {"tokens_per_s": a_metric("tokens_per_s", 9.0), "top1_agreement": a_metric("top1_agreement", 0.9)}
        )
        unknown = a_result({"tokens_per_s": a_metric("tokens_per_s", 8.0)}, stack=("bf16", "fp16"))
        for result in (good, unknown):
            results.add(session, result, {})
            standings.enter(session, result)
    migrations.downgrade(database_url, "0013")
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.read() as session:
        (board,) = leaderboard.query(session, LeaderboardQuery(min_top1=0.9)).boards
        assert [row.result_id for row in board.rows] == [good.id]
        assert not leaderboard.query(session, LeaderboardQuery(min_top1=0.91)).boards
        for filters in ({"technique": "bf16"}, {"technique": "fp16", "backend": "torch"}):
            (board,) = leaderboard.query(session, LeaderboardQuery(**filters)).boards
            assert [row.result_id for row in board.rows] == [unknown.id]


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
        for result in made:
            results.add(session, result, {})
            standings.enter(session, result)
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


def test_reports_of_before_stand_on_the_edge_leaderboard_the_newest_of_each_place(database_url: str) -> None:
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.write() as session:
        device_id = a_device(session)
        for sequence, windows in ((1, 10), (2, 5)):
            stored(session, device_id, a_report(windows=windows, sequence=sequence))
        hidden = stored(session, device_id, a_report(sequence=3), Reason.GOLDEN_FAILED)
        newest = session.scalars(select(func.max(DeviceReportRow.id)).where(DeviceReportRow.ranked)).one()
    migrations.downgrade(database_url, "0009")
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.read() as session:
        standing = {row.ranked: row.report_id for row in session.scalars(select(EdgeStanding))}
    assert standing == {True: newest, False: hidden}


def test_what_jobs_need_is_known_of_those_that_have_not_ended(database_url: str) -> None:
    """Workers of before say nothing of packages and models until they start again."""
    generate = {"workload": {"kind": "generate"}}
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.write() as session:
        workers.register(
            session, a_worker(packages=("bitsandbytes",), models=("path:mine",), downloads=False)
        )
        ended = jobs.submit(session, a_spec(**generate, model="path:mine")).job.id
        jobs.request_cancel(session, ended)
        posted = [jobs.submit(session, a_spec(**generate, model=model)).job.id for model in KEPT_MODELS]
    today = _needs(database_url)
    migrations.downgrade(database_url, "0006")
    migrations.upgrade(database_url)
    assert _needs(database_url) == [need for need in today if need[0] != ended]
    assert {job_id for job_id, _, _ in _needs(database_url)} == set(posted)
    with closing(Database(database_url)) as database, database.read() as session:
        (worker,) = workers.list_(session)
        assert (worker.packages, worker.models, worker.downloads) == ((), (), True)


def test_keys_that_expire_are_revoked_by_tables_that_know_no_end(database_url: str) -> None:
    """So that none lives for ever; the audit log and webhooks go with the revision that made them."""
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.write() as session:
        keys.create(session, "with an end", ["read"], timedelta(days=1))
        keys.create(session, "without", ["read"])
        audit.write(session, Actor(name="somebody"), AuditAction.KEY_CREATED, "a")
        webhooks.create(session, "https://hooks.example.org", WebhookEvent, "somebody")
        jobs.request_cancel(session, jobs.submit(session, a_spec()).job.id)
    migrations.downgrade(database_url, "0010")
    assert not {"audit_log", "webhooks", "webhook_deliveries"} & _tables(database_url)
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.read() as session:
        assert [(key.name, key.expires_at) for key in keys.list_(session)] == [("without", None)]
        assert audit.list_(session).changes == ()
        assert webhooks.list_(session) == []


def test_jobs_that_wait_for_a_scheduler_are_cancelled_by_tables_that_know_none(database_url: str) -> None:
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.write() as session:
        waits, failed = (jobs.submit(session, a_spec(via="slurm")).job.id for _ in range(2))
        usual = jobs.submit(session, a_spec()).job.id
        for _ in range(2):
            begun = launches.begin(session, Scheduler.SLURM)
            assert begun is not None
            if begun.job_id == failed:
                launches.end(session, begun.id, "It ended.")
        assert jobs.get(session, failed).failure is FailureKind.NOT_STARTED
    migrations.downgrade(database_url, "0013")
    assert not {"launches", "launchers"} & _tables(database_url)
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.read() as session:
        found = {job_id: jobs.get(session, job_id) for job_id in (waits, failed, usual)}
    states = [JobState.CANCELLED, JobState.CANCELLED, JobState.QUEUED]
    assert [job.state for job in found.values()] == states
    assert [job.failure for job in found.values()] == [None, FailureKind.LOST, None]
    assert str(found[waits].reason).endswith("post it again.")


def test_devices_go_with_the_revision_that_made_them_and_the_rest_stays(database_url: str) -> None:
    migrations.upgrade(database_url)
    fill(database_url)
    with closing(Database(database_url)) as database:
        fill_devices(database)
    migrations.downgrade(database_url, "0008")
    assert not [table for table in _tables(database_url) if table.startswith(("device", "edge_"))]
    migrations.upgrade(database_url)
    with closing(Database(database_url)) as database, database.read() as session:
        assert queue.counts(session)[JobState.SUCCEEDED] == 1
        assert devices.list_(session).devices == ()


KEPT_MODELS = ("bundled:tiny", "path:mine", "hub:nobody/tiny")


def _needs(url: str) -> list[tuple[str, str, str]]:
    with closing(Database(url)) as database, database.read() as session:
        rows = session.execute(text("SELECT job_id, kind, name FROM job_needs ORDER BY job_id, kind"))
        return [(row.job_id, row.kind, row.name) for row in rows]


def _board_of(url: str) -> list[dict[str, Any]]:
    with closing(Database(url)) as database, database.read() as session:
        found = session.execute(text("SELECT * FROM leaderboard ORDER BY result_id")).mappings()
        return [{name: _plain(value) for name, value in row.items()} for row in found]


def _plain(value: Any) -> Any:
    """A document as it was stored: SQLite gives its text."""
    return json.loads(value) if isinstance(value, str) and value[:1] == "{" else value


def test_tombstones_go_with_the_revision_that_made_them(database_url: str) -> None:
    migrations.upgrade(database_url)
    result = a_result()
    with closing(Database(database_url)) as database, database.write() as session:
        results.add(session, result, {})
        standings.enter(session, result)
        withdrawals.withdraw_result(session, result.id, Withdrawal(reason="wrong", withdrawn_by="alice"))
    migrations.downgrade(database_url, "0005")
    assert "tombstones" not in _tables(database_url)
    migrations.upgrade(database_url)
    with (
        closing(Database(database_url)) as database,
        database.read() as session,
        pytest.raises(NotFoundError, match="There is no result"),
    ):
        results.get(session, result.id)


def _lower_bounds(url: str) -> list[tuple[str, float | None]]:
    with closing(Database(url)) as database, database.read() as session:
        rows = session.execute(text("SELECT name, low FROM metrics ORDER BY name")).all()
    return [(row.name, row.low) for row in rows]


def test_progress_that_has_accumulated_is_removed_but_for_the_newest(database_url: str) -> None:
    migrations.upgrade(database_url, "0003")
    _execute(database_url, _JOB)
    for sequence, kind in enumerate(("state", "progressed", "planned", "progressed", "progressed"), start=1):
        _execute(
            database_url,
            f"INSERT INTO job_events VALUES ('a', {sequence}, '2026-01-01 00:00:00', '{kind}', '{{}}')",
        )
    migrations.upgrade(database_url)
    assert _events(database_url) == [(1, "state"), (3, "planned"), (5, "progressed")]
    migrations.downgrade(database_url, "0003")
    assert _events(database_url) == [(1, "state"), (3, "planned"), (5, "progressed")]


_JOB = """
    INSERT INTO jobs (id, state, created_at, schema_version, spec, workload, plan, backend, device, min_vram_bytes,
                      spec_digest, fencing, attempt, last_sequence, progress)
    VALUES ('a', 'running', '2026-01-01 00:00:00', 1, '{}', 'matmul', 'single', 'torch', 'cpu', 0, 'd', 1, 1, 5, '{}')
"""


def _events(url: str) -> list[tuple[int, str]]:
    with closing(Database(url)) as database, database.read() as session:
        return [(event.sequence, event.kind) for event in events.after(session, "a", 0)]


def test_an_upgrade_leaves_the_data_of_a_current_database_alone(database_url: str) -> None:
    migrations.upgrade(database_url)
    fill(database_url)
    migrations.upgrade(database_url)
    database = Database(database_url)
    with database.read() as session:
        assert queue.counts(session)[JobState.SUCCEEDED] == 1
    database.close()


def test_the_tables_are_those_of_the_migrations(database_url: str) -> None:
    migrations.upgrade(database_url)
    migrations.check(database_url)


def test_a_difference_is_found(database_url: str) -> None:
    migrations.upgrade(database_url)
    _execute(database_url, "ALTER TABLE workers DROP COLUMN version")
    with pytest.raises(StoreError, match=r"(?s)workers.*Write a migration"):
        migrations.check(database_url)


def test_nothing_is_left_of_a_migration_that_fails(database_url: str) -> None:
    _execute(database_url, "CREATE TABLE variants (id INTEGER)")
    with pytest.raises(StoreError, match="variants"):
        migrations.upgrade(database_url)
    assert _tables(database_url) <= {"variants", "alembic_version"}
    assert migrations.current(database_url) is None


def test_an_empty_database_is_not_current(database_url: str) -> None:
    assert migrations.lacking(database_url) == (
        "The database has no tables yet; run `alembic upgrade head` on it."
    )


def test_an_unknown_revision_is_refused_with_a_sentence(database_url: str) -> None:
    with pytest.raises(StoreError, match="cannot be migrated"):
        migrations.upgrade(database_url, "nonsense")


def test_a_server_that_is_away_is_said_to_be_away() -> None:
    with pytest.raises(StoreUnavailableError):
        migrations.lacking("postgresql://nobody@127.0.0.1:1/none")


@pytest.mark.slow
def test_two_processes_may_upgrade_at_once(database_url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_upgrade_in_a_process, [database_url] * 2))
    assert migrations.lacking(database_url) is None


@pytest.mark.slow
def test_the_command_line_migrates_the_database_of_the_environment(database_url: str, tmp_path: Path) -> None:
    _alembic({"OPTIGPU_DATABASE_URL": database_url}, "upgrade", "head")
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
