"""A database with something in it: a job with its result, and an edge device with a report."""

from contextlib import closing
from datetime import timedelta

from api import enrolment, measurements
from optigpu.documents.administration import AlertKind, AlertRequest
from optigpu.documents.devices import ClaimRequest, DeviceMessage
from optigpu.documents.events import Printed
from optigpu.documents.manifest import ModelManifest
from optigpu.store import alerts, device_reports, devices, edge_figures, jobs, keys, leaderboard, outcomes
from optigpu.store.artifacts import Artifact
from optigpu.store.database import Database
from optigpu.store.devices import DeviceRequest
from optigpu.store.filters import LeaderboardQuery
from optigpu.vocabulary import JobState
from tests.service.device_client import Claim, invited, manifest, message, report
from tests.service.records import NOON, a_plan, a_result, a_spec, an_outcome, claimed


def fill(url: str) -> None:
    """A job that has succeeded, with a result, samples and a file; a rule for its place, and a browser that is signed
    in."""
    with closing(Database(url)) as database, database.write() as session:
        jobs.submit(session, a_spec(), idempotency_key="key")
        lease = claimed(session)
        outcomes.plan(session, lease, a_plan("baseline"))
        file = Artifact(name="trace.json", media_type="application/json", size_bytes=2, data=b"{}")
        outcomes.save_outcome(session, lease, an_outcome(a_result(), {"tokens_per_s": ((1.0,),)}), [file])
        outcomes.printed(session, lease, Printed(index=0, text="A warning of a library."))
        outcomes.finish(session, lease, JobState.SUCCEEDED)
        (board,) = leaderboard.query(session, LeaderboardQuery()).boards
        rule = AlertRequest(result_id=board.rows[0].result_id, kind=AlertKind.CHANGE_POINT)
        alerts.create(session, rule, "somebody")
        key = keys.verify(session, keys.create(session, "a browser's", ["read"]))
        assert key is not None
        keys.sign_in(session, key.id, timedelta(hours=1))


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
        edge_figures.add(session, ModelManifest.model_validate(manifest()))
        device = devices.enter(session, request)
        run = device_reports.start_run(session, request, "a" * 64)
        sent = DeviceMessage.model_validate(message(report(1, run.id)))
        assert len(measurements.take(session, request, device, sent).reports) == 1
