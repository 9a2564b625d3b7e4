"""A job from the queue to the leaderboard, in the test's own process: real databases, real measuring processes."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from optigpu.documents.queries import LeaderboardQuery
from optigpu.documents.rounds import RoundRecord, counted
from optigpu.documents.versions import why_none_ranks
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.models.held import MODELS_DIR, SINGLE
from optigpu.models.loading.load import load_model
from optigpu.models.reference import parse_reference
from optigpu.store import events, jobs, leaderboard, leases, results
from optigpu.store.database import Database, default_url
from optigpu.vocabulary import JobState, VariantStatus, utc_now
from tests.engine.brought_kernels import HONEST
from tests.service.processes import eventually
from tests.service.serving import (
    AT_ONCE,
    ENDLESS,
    QUICK,
    hopeless,
    look,
    matmul,
    measuring_processes,
    migrated,
    submit,
    tiny_ladder,
    worker_context,
    working,
)
from worker.capabilities import with_models
from worker.execute import execute_next

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Locks and data of this test alone, so that it neither waits for nor disturbs a worker of this machine."""
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))


@pytest.fixture
def either_database(database_url: str) -> Iterator[Database]:
    """On both engines: for the stories that touch most of the store."""
    with migrated(database_url) as database:
        yield database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with migrated(default_url(tmp_path)) as database:
        yield database


@pytest.mark.slow
def test_a_job_goes_from_the_queue_to_the_leaderboard(either_database: Database) -> None:
    database = either_database
    job_id = submit(database, matmul(sizes=(64, 65)))
    assert execute_next(worker_context(database))
    job = look(database, job_id)
    assert job.state is JobState.SUCCEEDED
    assert statuses(database, job_id) == [VariantStatus.SUCCEEDED] * 2
    assert [(attempt.number, attempt.outcome) for attempt in job.attempts] == [(1, "succeeded")]
    with database.read() as session:
        stored = results.of_job(session, job_id)
        samples = results.samples(session, stored[0]["id"]).samples
        boards = leaderboard.query(session, LeaderboardQuery(metric="tflops", include_invalid=True)).boards
        kinds = [event.kind for event in events.after(session, job_id, 0)]
    assert job.reason == why_none_ranks(stored), "None, unless the machine was too busy"
    assert [document["id"] for document in stored] == [variant.result_id for variant in job.variants]
    (rounds,) = (
        [RoundRecord.model_validate(record) for record in process] for process in stored[0]["rounds"]
    )
    (tflops,) = samples["tflops"]
    assert len(tflops) == sum(record.requests for record in rounds), "those set aside are stored as well"
    assert len(counted(rounds, tflops)) == stored[0]["metrics"]["tflops"]["n"]
    assert {row.result_id for board in boards for row in board.rows} == {
        document["id"] for document in stored
    }
    told = [kind for kind in kinds if kind not in ("progressed", "rough")]
    measured = [*["variant_started"] * 2, *["variant_finished"] * 2]
    assert told == ["state", "state", "planned", "estimated", *measured, "finished", "state"]
    assert kinds.index("rough") > kinds.index("variant_started")


@pytest.mark.slow
def test_what_cannot_run_here_ends_its_variant_and_the_job_goes_on(database: Database) -> None:
    job_id = submit(database, matmul(dtypes=("tf32", "float32")))
    assert execute_next(worker_context(database))
    job = look(database, job_id)
    assert job.state is JobState.SUCCEEDED
    assert statuses(database, job_id) == [VariantStatus.UNSUPPORTED, VariantStatus.SUCCEEDED]
    assert "tf32" in (job.variants[0].reason or "")


def test_a_worker_runs_no_code_of_a_job_unless_its_operator_allows_it(database: Database) -> None:
    """Whatever the service that stored the job was told."""
    job_id = submit(database, JobSpec.model_validate({"workload": {"kind": "kernel", "kernel": HONEST}}))
    assert execute_next(worker_context(database))
    job = look(database, job_id)
    assert job.state is JobState.FAILED
    assert "OPTIGPU_KERNELS=true, for the API and for each worker" in (job.reason or "")


@pytest.mark.long
@pytest.mark.slow
def test_a_job_of_which_nothing_can_be_ranked_succeeds_and_says_so(database: Database) -> None:
    """Without most of its weights the model predicts other tokens, which the job's own limit does not allow."""
    job_id = submit(database, hopeless())
    assert execute_next(worker_context(database))
    job = look(database, job_id)
    assert job.state is JobState.SUCCEEDED
    assert (job.reason or "").startswith("Nothing that was measured can be ranked: ")
    assert "quality_below_gate (1 of 1)" in (job.reason or "")
    assert job.progress.fraction == 1


@pytest.mark.slow
def test_variants_after_the_deadline_fail_with_it(database: Database) -> None:
    """One product takes longer than that."""
    job_id = submit(database, matmul(sizes=(4096, 4097), limits=AT_ONCE | {"timeout_s": 0.2}))
    assert execute_next(worker_context(database))
    job = look(database, job_id)
    assert job.state is JobState.FAILED
    assert [variant.status for variant in job.variants] == [VariantStatus.FAILED] * 2
    assert all("raise limits.timeout_s" in (variant.reason or "") for variant in job.variants)
    assert "raise limits.timeout_s" in (job.reason or "")


def test_a_job_whose_time_cannot_suffice_fails_before_it_starts(database: Database) -> None:
    job_id = submit(database, matmul(sizes=(64, 65), measure=ENDLESS, limits={"timeout_s": 1000}))
    assert execute_next(worker_context(database))
    job = look(database, job_id)
    assert job.state is JobState.FAILED
    assert (job.reason or "").startswith("limits.timeout_s: 2 variants of at least 600 s each take more than")
    assert {variant.status for variant in job.variants} == {VariantStatus.CANCELLED}


@pytest.mark.slow
def test_a_cancelled_job_ends_its_processes(database: Database) -> None:
    job_id = submit(database, matmul(measure=ENDLESS))
    with working(worker_context(database)):
        (child,) = eventually(measuring_processes)
        with database.write() as session:
            jobs.request_cancel(session, job_id)
        child.wait(timeout=15)
        assert eventually(lambda: look(database, job_id).state.is_final)
    job = look(database, job_id)
    assert job.state is JobState.CANCELLED
    assert (job.reason or "").startswith("Cancelled on request. Variants with all replicates: 0,")
    assert [variant.status for variant in job.variants] == [VariantStatus.CANCELLED]


@pytest.mark.slow
def test_the_next_worker_goes_on_where_one_that_was_told_to_end_left_off(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is what has ended: here one variant, since no two are resident side by side."""
    monkeypatch.setattr("optigpu.conductor.processes.residents.MOST_RESIDENT", 1)
    job_id = submit(database, matmul(sizes=(64, 65)))
    with working(worker_context(database)):
        assert eventually(lambda: statuses(database, job_id)[:1] == [VariantStatus.SUCCEEDED])
    half = look(database, job_id)
    assert (half.state, half.attempts[0].outcome) == (JobState.QUEUED, "released")
    assert statuses(database, job_id) == [VariantStatus.SUCCEEDED, VariantStatus.PENDING]

    assert execute_next(worker_context(database))
    job = look(database, job_id)
    assert (job.state, [attempt.outcome for attempt in job.attempts]) == (
        JobState.SUCCEEDED,
        ["released", "succeeded"],
    )
    assert job.variants[0].result_id == half.variants[0].result_id
    assert job.attribution is not None
    assert [row["index"] for row in job.attribution["rows"]] == [0, 1]
    assert count(database, "results") == 2


@pytest.mark.slow
def test_a_worker_that_lost_its_lease_stops_and_writes_nothing(database: Database) -> None:
    job_id = submit(database, matmul(measure=ENDLESS))
    context = worker_context(database)
    with working(context):
        (child,) = eventually(measuring_processes)
        with database.write() as session:
            assert leases.sweep(session, utc_now() + timedelta(hours=1)).requeued == (job_id,)
        before = look(database, job_id)
        child.wait(timeout=15)
        assert eventually(lambda: context.job_id is None)
    assert look(database, job_id) == before
    assert before.state is JobState.QUEUED


@pytest.mark.slow
def test_a_measuring_process_that_is_killed_ends_its_variant_alone(database: Database) -> None:
    """Each takes seconds: its process still measures when it is found, and the other's may have begun."""
    seconds = QUICK | {"min_seconds": 2.0, "max_seconds": 4.0}
    job_id = submit(database, matmul(sizes=(64, 65), measure=seconds))
    with working(worker_context(database)):
        assert eventually(lambda: statuses(database, job_id)[:1] == [VariantStatus.RUNNING])
        first = min(eventually(measuring_processes), key=lambda process: process.create_time())
        first.kill()
        assert eventually(lambda: look(database, job_id).state.is_final)
    job = look(database, job_id)
    assert job.state is JobState.SUCCEEDED
    assert [variant.status for variant in job.variants] == [VariantStatus.FAILED, VariantStatus.SUCCEEDED]
    assert "killed by signal 9" in (job.variants[0].reason or "")


@pytest.mark.slow
def test_a_fault_of_our_own_fails_the_job_and_the_worker_lives(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = submit(database, matmul()), submit(database, matmul())
    context = worker_context(database)
    with monkeypatch.context() as patch:
        patch.setattr("worker.execute.run", lambda *_, **__: [].pop())
        assert execute_next(context)
    assert execute_next(context)
    job = look(database, broken)
    assert (job.state, job.reason) == (JobState.FAILED, "The worker failed (IndexError); its log says where.")
    assert look(database, sound).state is JobState.SUCCEEDED


@pytest.mark.slow
def test_a_damaged_model_fails_each_rung_with_a_sentence_that_names_the_file(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = tmp_path / "models"
    whole = load_model(parse_reference("preset:tiny-llama-test"), device="cpu", dtype="float32")
    whole.save_pretrained(models / "cut")
    weights = models / "cut" / SINGLE
    weights.write_bytes(weights.read_bytes()[:-99])
    monkeypatch.setenv(MODELS_DIR, str(models))
    ladder = tiny_ladder().model_dump(mode="json") | {"model": "path:cut"}
    job_id = submit(database, JobSpec.model_validate(ladder))
    context = worker_context(database)
    assert execute_next(replace(context, info=with_models(context.info)))
    job = look(database, job_id)
    assert job.state is JobState.FAILED
    for variant in job.variants:
        assert "model.safetensors" in (variant.reason or "")
        assert "\n" not in (variant.reason or "")
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_each_job_is_told_what_lies_on_disk_when_it_begins(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measuring process imports what lies there, so what a worker saw at its start may be out of date."""
    context, here = worker_context(database), probe()
    jobs_of = [submit(database, matmul()) for _ in range(2)]
    for revision in ("first", "second"):
        now = here.model_copy(update={"git_revision": revision})
        monkeypatch.setattr("optigpu.conductor.session.probe", lambda now=now: now)
        assert execute_next(context)
    with database.read() as session:
        found = [results.of_job(session, job_id)[0]["environment"]["git_revision"] for job_id in jobs_of]
    assert found == ["first", "second"]


def statuses(database: Database, job_id: str) -> list[VariantStatus]:
    return [variant.status for variant in look(database, job_id).variants]


def count(database: Database, table: str) -> int:
    with database.read() as session:
        rows: int = session.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
    return rows
