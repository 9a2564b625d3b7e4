"""Jobs that are handed to a scheduler: which, how often, and what follows when nothing comes of it."""

from datetime import timedelta

from sqlalchemy import update
from sqlalchemy.orm import Session

from optigpu.documents.views import LaunchState, Want
from optigpu.store import jobs, launchers, launches, leases, queue, workers
from optigpu.store.database import Database
from optigpu.store.launches import Begun, Pilot
from optigpu.store.leases import Lease
from optigpu.store.tables import Job, LauncherRow
from optigpu.vocabulary import DeviceKind, FailureKind, JobState, Scheduler, utc_now
from tests.service.records import a_spec, a_worker

SLURM, RETIRED = Scheduler.SLURM, Scheduler.KUBERNETES


def posted(session: Session, **fields: object) -> str:
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
        usual, high, other = posted(session), posted(session, priority=2), posted(session)
        session.get_one(Job, other).via = RETIRED
        posted(session, via=None)
        assert [begun(session).job_id for _ in range(2)] == [high, usual]
        assert launches.begin(session, SLURM) is None
        assert [each.job_id for each in launches.live(session, SLURM)] == [high, usual]


def test_a_launch_that_ends_without_a_claim_is_an_attempt_and_the_third_parks_the_job(
    database: Database,
) -> None:
    with database.write() as session:
        job_id = posted(session)
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
        job_id, launch = posted(session), begun(session)
        lease = claimed(session, launch)
        launches.end(session, launch.id, "Slurm's job 7 ended as NODE_FAIL.")
        assert jobs.get(session, job_id).state is JobState.RUNNING
        assert launches.verify(session, launch.token) is None
        assert launches.begin(session, SLURM) is None
        leases.sweep(session, utc_now() + timedelta(hours=1))
        assert begun(session).job_id == job_id
        assert lease.fencing == 1


def test_an_allocation_that_its_scheduler_starts_again_claims_with_the_same_token(database: Database) -> None:
    with database.write() as session:
        launch = (posted(session), begun(session))[1]
        claimed(session, launch)
        leases.sweep(session, utc_now() + timedelta(hours=1))
        assert claimed(session, launch, "the next").fencing == 2


def test_a_job_for_a_scheduler_waits_in_its_queue_and_in_none_of_ours(database: Database) -> None:
    with database.write() as session:
        workers.register(session, a_worker())
        job_id, usual = posted(session), posted(session, via=None)
        assert jobs.get(session, job_id).queue_position is None
        assert jobs.get(session, usual).queue_position == 1
        assert queue.due(session, DeviceKind.CPU, utc_now(), 10) == [usual]


def test_a_job_says_if_nobody_hands_it_over(database: Database) -> None:
    with database.write() as session:
        workers.register(session, a_worker())
        job_id = posted(session)
        unserved = jobs.get(session, job_id).unserved
        assert unserved is not None
        assert (unserved.want, unserved.name) == (Want.LAUNCHER, "slurm")
        assert unserved.sentence.startswith("No launcher for slurm is alive. Start one")
        launchers.seen(session, SLURM, "squeue did not answer within 30 s.")
        unserved = jobs.get(session, job_id).unserved
        assert unserved is not None
        assert unserved.sentence == "squeue did not answer within 30 s."
        launchers.seen(session, SLURM, None)
        assert jobs.get(session, job_id).unserved is None
        session.execute(update(LauncherRow).values(seen_at=utc_now() - timedelta(minutes=3)))
        assert jobs.get(session, job_id).unserved is not None


def test_a_job_shows_where_it_is(database: Database) -> None:
    with database.write() as session:
        job_id, launch = posted(session), begun(session)
        launches.note(session, launch.id, LaunchState.PENDING, "12")
        shown = jobs.get(session, job_id).launch
        assert shown is not None
        assert (shown.scheduler, shown.state, shown.reference) == (SLURM, LaunchState.PENDING, "12")
        launches.end(session, launch.id, "It ended.")
        launches.note(session, launch.id, LaunchState.RUNNING, "12")  # from a round that began before
        shown = jobs.get(session, job_id).launch
        assert shown is not None
        assert (shown.state, shown.reason) == (LaunchState.ENDED, "It ended.")


def test_results_that_are_there_answer_no_job_for_a_scheduler(database: Database) -> None:
    """On which hardware it would run is not known before its scheduler allocates some."""
    with database.write() as session:
        workers.register(session, a_worker())
        assert jobs.get(session, posted(session)).state is JobState.QUEUED
