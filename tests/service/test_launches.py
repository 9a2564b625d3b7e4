"""Jobs that are handed to a scheduler: which, how often, and what follows when it is away, hangs, refuses or lies.

The schedulers' programs are the test's own, on PATH; they note how they were called.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from optigpu.documents.views import LaunchState, Want
from optigpu.store import jobs, launches, leases, workers
from optigpu.store.database import Database
from optigpu.store.launches import Begun, Pilot
from optigpu.store.leases import Lease
from optigpu.store.tables import Job, LauncherRow
from optigpu.vocabulary import FailureKind, JobState, Scheduler, utc_now
from tests.service.conftest import empty
from tests.service.records import a_spec, a_worker
from tests.service.serving import look
from worker import __main__ as program
from worker.context import LauncherSettings
from worker.launch import LaunchLoop
from worker.launchers.slurm import Slurm

SLURM, RETIRED = Scheduler.SLURM, Scheduler.KUBERNETES
Install = Callable[[str, str], None]
NO_JOBS = """echo '{"jobs": []}'"""
SUBMIT = "sed -n 's/^#SBATCH --job-name=//p' > $here/name; echo 7"
"""An sbatch that keeps the name of the last job."""


def posted_in(session: Session, **fields: object) -> str:
    return jobs.submit(session, a_spec(**{"via": "slurm"} | fields)).job.id


def begun(session: Session) -> Begun:
    found = launches.begin(session, SLURM)
    assert found is not None
    return found


def claimed(session: Session, launch: Begun, name: str = "pilot") -> Lease:
    pilot = launches.verify(session, launch.token)
    assert pilot == Pilot(launch_id=launch.id, job_id=launch.job_id)
    lease = launches.claim(session, pilot, a_worker(name), 30)
    assert isinstance(lease, Lease)
    return lease


def forget_waits(session: Session) -> None:
    session.execute(update(Job).values(not_before=None))


def test_the_highest_priority_is_handed_over_first_and_each_job_once(database: Database) -> None:
    with database.write() as session:
        usual, high, other = posted_in(session), posted_in(session, priority=2), posted_in(session)
        session.get_one(Job, other).via = RETIRED
        posted_in(session, via=None)
        assert [begun(session).job_id for _ in range(2)] == [high, usual]
        assert launches.begin(session, SLURM) is None
        assert [each.job_id for each in launches.live(session, SLURM)] == [high, usual]


def test_a_launch_that_ends_without_a_claim_is_an_attempt_and_the_third_parks_the_job(
    database: Database,
) -> None:
    with database.write() as session:
        job_id = posted_in(session)
        for _ in range(3):
            forget_waits(session)
            launches.end(session, begun(session).id, "Slurm's job 7 ended as FAILED.")
        job = jobs.get(session, job_id)
        assert (job.state, job.parked, job.failure) == (JobState.FAILED, True, FailureKind.NOT_STARTED)
        assert [attempt.outcome for attempt in job.attempts] == ["not_started"] * 2 + ["failed"]
        assert job.reason == "Slurm's job 7 ended as FAILED."
        jobs.retry(session, job_id)
        assert claimed(session, begun(session)).attempt == 4


def test_the_end_of_a_launch_whose_job_was_claimed_changes_nothing_of_the_job(database: Database) -> None:
    with database.write() as session:
        job_id, launch = posted_in(session), begun(session)
        lease = claimed(session, launch)
        launches.end(session, launch.id, "Slurm's job 7 ended as NODE_FAIL.")
        assert jobs.get(session, job_id).state is JobState.RUNNING
        assert launches.verify(session, launch.token) is None
        assert launches.begin(session, SLURM) is None
        leases.sweep(session, utc_now() + timedelta(hours=1))
        assert begun(session).job_id == job_id
        assert lease.fencing == 1


def test_a_job_says_if_nobody_hands_it_over(database: Database) -> None:
    with database.write() as session:
        workers.register(session, a_worker())
        job_id = posted_in(session)
        unserved = jobs.get(session, job_id).unserved
        assert unserved is not None
        assert (unserved.want, unserved.name) == (Want.LAUNCHER, "slurm")
        assert unserved.sentence.startswith("No launcher for slurm is alive. Start one")
        launches.seen(session, SLURM, "squeue did not answer within 30 s.")
        unserved = jobs.get(session, job_id).unserved
        assert unserved is not None
        assert unserved.sentence == "squeue did not answer within 30 s."
        launches.seen(session, SLURM, None)
        assert jobs.get(session, job_id).unserved is None
        session.execute(update(LauncherRow).values(seen_at=utc_now() - timedelta(minutes=3)))
        assert jobs.get(session, job_id).unserved is not None


def test_a_job_shows_where_it_is(database: Database) -> None:
    with database.write() as session:
        job_id, launch = posted_in(session), begun(session)
        launches.note(session, launch.id, LaunchState.PENDING, "12")
        shown = jobs.get(session, job_id).launch
        assert shown is not None
        assert (shown.scheduler, shown.state, shown.reference) == (SLURM, LaunchState.PENDING, "12")
        launches.end(session, launch.id, "It ended.")
        launches.note(session, launch.id, LaunchState.RUNNING, "12")  # from a round that began before
        shown = jobs.get(session, job_id).launch
        assert shown is not None
        assert (shown.state, shown.reason) == (LaunchState.ENDED, "It ended.")


def listed(state: str) -> str:
    """An squeue that lists this job."""
    return f"""printf '{{"jobs": [{{"job_id": 7, "name": "%s", "job_state": "{state}"}}]}}' "$(cat $here/name)" """


@pytest.fixture
def on_sqlite(sqlite_database: Database) -> Database:
    """With empty tables; these faults are seen by no database."""
    empty(sqlite_database)
    return sqlite_database


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("worker.launchers.base.PATIENCE_S", 0.5)
    return folder


@pytest.fixture
def install(programs: Path) -> Install:
    """Writes a program: a shell script that notes its arguments."""

    def write(name: str, script: str) -> None:
        program = programs / name
        program.write_text(f'#!/bin/sh\nhere={programs}\necho "{name} $*" >> $here/calls\n{script}\n')
        program.chmod(0o755)

    return write


def calls(programs: Path) -> list[str]:
    return (programs / "calls").read_text().splitlines()


def launcher(on_sqlite: Database, **settings: object) -> LaunchLoop:
    given = LauncherSettings.model_validate({"url": "https://bench.example.org"} | settings)
    return LaunchLoop(Scheduler.SLURM, Slurm(), on_sqlite, given)


def posted(on_sqlite: Database) -> str:
    with on_sqlite.write() as session:
        return jobs.submit(session, a_spec(via="slurm")).job.id


def problem(on_sqlite: Database, job_id: str) -> str:
    unserved = look(on_sqlite, job_id).unserved
    assert unserved is not None
    return unserved.sentence


def test_a_scheduler_whose_programs_are_missing(
    on_sqlite: Database, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    job_id = posted(on_sqlite)
    launcher(on_sqlite).round()
    assert problem(on_sqlite, job_id) == (
        "squeue is not installed here; start the launcher where the scheduler's programs are."
    )
    assert look(on_sqlite, job_id).launch is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("sleep 30", "squeue did not answer within 0.5 s; check that the scheduler runs."),
        ("echo Hello, I am a teapot", "squeue answered what cannot be read: Hello, I am a teapot"),
        ("printf '\\001\\377{'", "squeue answered what cannot be read: ?\ufffd{"),
        ("""echo '{"jobs": [{"job_id": "many"}]}'""", "squeue answered what cannot be read:"),
        ("true", "squeue answered what cannot be read: nothing"),
        (
            "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
            "squeue refused: slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        ),
    ],
    ids=["hangs", "talks", "binary", "other types", "silent", "controller away"],
)
def test_a_scheduler_that_hangs_or_answers_nonsense_loses_nothing(
    on_sqlite: Database, install: Install, programs: Path, script: str, sentence: str
) -> None:
    install("squeue", script)
    install("sbatch", SUBMIT)
    job_id, loop = posted(on_sqlite), launcher(on_sqlite)
    loop.round()
    assert problem(on_sqlite, job_id).startswith(sentence)
    assert not [call for call in calls(programs) if call.startswith("sbatch")]
    install("squeue", NO_JOBS)
    loop.round()
    job = look(on_sqlite, job_id)
    assert (job.unserved, job.state) == (None, JobState.QUEUED)
    assert job.launch is not None
    assert (job.launch.reference, job.launch.state) == ("7", LaunchState.PENDING)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [f"{SUBMIT} > /dev/null; sleep 30", f"{SUBMIT} > /dev/null; echo Submitted?"]
)
def test_a_submission_of_unknown_outcome_is_found_again_and_not_repeated(
    on_sqlite: Database, install: Install, programs: Path, script: str
) -> None:
    install("sbatch", script)
    install("squeue", NO_JOBS)
    job_id, loop = posted(on_sqlite), launcher(on_sqlite)
    loop.round()
    assert problem(on_sqlite, job_id).startswith("sbatch ")
    loop.round()
    install("squeue", listed("RUNNING"))
    loop.round()
    job = look(on_sqlite, job_id)
    assert job.launch is not None
    assert (job.launch.reference, job.launch.state) == ("7", LaunchState.RUNNING)
    assert len([call for call in calls(programs) if call.startswith("sbatch")]) == 1


@pytest.mark.slow
def test_a_submission_that_never_arrived_is_repeated(
    on_sqlite: Database, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("sbatch", "sleep 30")
    install("squeue", NO_JOBS)
    job_id, loop = posted(on_sqlite), launcher(on_sqlite)
    loop.round()
    first = look(on_sqlite, job_id).launch
    monkeypatch.setattr("worker.launch.UNCONFIRMED", 0 * first.created_at.resolution)  # type: ignore[union-attr]
    install("sbatch", SUBMIT)
    loop.round()
    job = look(on_sqlite, job_id)
    assert job.launch is not None
    assert job.launch.reference == "7"
    assert [attempt.outcome for attempt in job.attempts] == ["not_started"]


def test_what_the_scheduler_refuses_is_the_job_s_reason(on_sqlite: Database, install: Install) -> None:
    install("squeue", NO_JOBS)
    install("sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    job_id = posted(on_sqlite)
    launcher(on_sqlite).round()
    job = look(on_sqlite, job_id)
    assert job.reason is not None
    assert job.reason.startswith(
        "sbatch refused: sbatch: error: invalid partition specified: gpu It is tried again"
    )


def test_a_job_that_the_scheduler_has_forgotten_is_handed_over_again(
    on_sqlite: Database, install: Install, programs: Path
) -> None:
    install("squeue", NO_JOBS)
    install("sbatch", SUBMIT)
    install("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    job_id, loop = posted(on_sqlite), launcher(on_sqlite)
    loop.round()
    loop.round()
    assert "scontrol show job --oneliner 7" in calls(programs)
    assert [attempt.outcome for attempt in look(on_sqlite, job_id).attempts] == ["not_started"]
    install("scontrol", "echo 'JobId=7 JobName=other JobState=RUNNING Reason=None'")
    loop.round()


def test_a_cancel_that_is_refused_is_tried_again(
    on_sqlite: Database, install: Install, programs: Path
) -> None:
    install("squeue", NO_JOBS)
    install("sbatch", SUBMIT)
    job_id, loop = posted(on_sqlite), launcher(on_sqlite)
    loop.round()
    install("squeue", listed("PENDING"))
    install("scancel", "echo 'scancel: error: Kill job error on job id 7: Access denied' >&2; exit 1")
    with on_sqlite.write() as session:
        jobs.request_cancel(session, job_id)
    loop.round()
    loop.round()
    assert len([call for call in calls(programs) if call == "scancel 7"]) == 2


def test_no_more_jobs_are_handed_over_than_the_setting_says(
    on_sqlite: Database, install: Install, programs: Path
) -> None:
    install("squeue", NO_JOBS)
    install("sbatch", SUBMIT)
    for _ in range(3):
        posted(on_sqlite)
    launcher(on_sqlite, launch_at_once=2).round()
    assert len([call for call in calls(programs) if call.startswith("sbatch")]) == 2


def test_the_token_is_in_no_argument_and_no_script_and_the_database_s_address_in_no_variable(
    on_sqlite: Database, install: Install, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", "postgresql://optigpu:hunter2@db/optigpu")
    install("squeue", NO_JOBS)
    install("sbatch", "env > $here/variables; cat > $here/script; echo 7")
    posted(on_sqlite)
    launcher(on_sqlite).round()
    variables = (programs / "variables").read_text()
    token = next(
        line for line in variables.splitlines() if line.startswith("OPTIGPU_PILOT_TOKEN=")
    ).partition("=")[2]
    assert token.startswith(launches.TOKEN_PREFIX)
    assert "OPTIGPU_URL=https://bench.example.org" in variables
    assert token not in (programs / "script").read_text() + "".join(calls(programs))
    assert "hunter2" not in variables


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--once"], "--once and --job belong together"),
        (["--job", "7"], "--once and --job belong together"),
        (["--launch", "slurm", "--device", "cpu"], "--launch runs no job itself"),
        (["--launch", "pbs"], "invalid"),
        (
            ["--launch", "slurm"],
            "Pilots send their tokens to OPTIGPU_URL, which is 'http://bench.example.org'",
        ),
        (["--once", "--job", "7"], "OPTIGPU_PILOT_TOKEN"),
    ],
)
def test_a_worker_that_is_started_wrongly_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("OPTIGPU_URL", "http://bench.example.org")
    monkeypatch.delenv("OPTIGPU_PILOT_TOKEN", raising=False)
    monkeypatch.setattr("sys.argv", ["worker", *arguments])
    try:
        status: object = program.main()
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err
