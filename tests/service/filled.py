"""A database with something in it: a job with its result, and an edge device with a report."""

from contextlib import closing

from api import enrolment, measurements
from optigpu.documents.devices import ClaimRequest, DeviceMessage
from optigpu.documents.manifest import ModelManifest
from optigpu.store import device_reports, devices, edge_models, jobs, leaderboard, leases, outcomes
from optigpu.store.artifacts import Artifact
from optigpu.store.database import Database
from optigpu.store.devices import DeviceRequest
from optigpu.store.filters import LeaderboardQuery
from optigpu.vocabulary import JobState
from tests.service.device_client import Claim, invited, manifest, message, report
from tests.service.records import NOON, a_plan, a_result, a_spec, a_worker, an_outcome


def fill(url: str) -> None:
    """A job that has succeeded, with a result, samples and a file."""
    with closing(Database(url)) as database, database.write() as session:
        jobs.submit(session, a_spec(), idempotency_key="key")
        lease = leases.claim(session, a_worker(), 30)
        assert lease is not None
        outcomes.plan(session, lease, a_plan("baseline"))
        file = Artifact(name="trace.json", media_type="application/json", size_bytes=2, data=b"{}")
        outcomes.save_outcome(session, lease, an_outcome(a_result(), {"tokens_per_s": ((1.0,),)}), [file])
        outcomes.finish(session, lease, JobState.SUCCEEDED)
        assert leaderboard.query(session, LeaderboardQuery()).boards


def fill_devices(database: Database) -> None:
    """A device that enrolled, began a run and reported on it."""
    invitation = Claim(invited(database)).body
    with database.write() as session:
        device_id = enrolment.claim(session, ClaimRequest.model_validate(invitation)).answer.device_id
        request = DeviceRequest(
            device_id=device_id,
            key_version=1,
            boot_id="b" * 16,
            sequence=1,
            firmware_sha256="c" * 64,
            clock_synchronised=True,
            received_at=NOON,
        )
        edge_models.add(session, ModelManifest.model_validate(manifest()))
        device = devices.enter(session, request)
        run = device_reports.start_run(session, request, "a" * 64)
        sent = DeviceMessage.model_validate(message(report(1, run.id)))
        assert len(measurements.take(session, request, device, sent).reports) == 1
