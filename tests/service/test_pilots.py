"""Pilots: one job's worker by HTTP, with a token that opens this job and nothing else; and as a process of its own."""

import base64
import hashlib
import os
import subprocess
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import select, update

from optigpu import __version__
from optigpu.documents.events import (
    Estimated,
    Fail,
    Finish,
    PilotBeat,
    PilotEnd,
    PilotEvent,
    PilotFile,
    PilotOutcome,
    Planned,
    Release,
    VariantStarted,
)
from optigpu.documents.result import Outcome, Result
from optigpu.documents.views import ProgressView
from optigpu.job.measured import as_measured, summary_of
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.store import events, keys, launches, leases, results
from optigpu.store.launches import Begun
from optigpu.store.results import PIECE_BYTES
from optigpu.store.tables import LaunchRow, ResultRow
from optigpu.vocabulary import JobState, LeaseLostError, OptiGPUError, Scheduler, utc_now
from tests.service.processes import Processes, eventually, watched_processes
from tests.service.records import a_plan, a_result, a_worker, an_outcome
from tests.service.serving import ENDLESS, MATMUL, Served, look, matmul, measuring_processes, serving
from worker.pilot import ServiceCalls

JOB = MATMUL | {"via": "slurm"}
WORKER = a_worker(version=__version__)
DONE = Finish(state=JobState.SUCCEEDED)
VARIABLES = ("OPTIGPU_DATABASE_URL", "OPTIGPU_REDIS_URL")


def launched(service: Served, document: dict[str, Any] = JOB) -> Begun:
    """A job that was posted and handed over."""
    service.submit(document)
    with service.database.write() as session:
        begun = launches.begin(session, Scheduler.SLURM)
    assert begun is not None
    return begun


class Calls:
    """The calls with one token, and the fencing number of its claim."""

    def __init__(self, service: Served, token: str) -> None:
        self.service = service
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self.fencing = 1

    def post(self, path: str, body: Any) -> httpx.Response:
        content = body.model_dump_json()
        return self.service.client.post(f"/v1/pilot/{path}", content=content, headers=self.headers)

    def get(self, path: str) -> httpx.Response:
        return self.service.client.get(f"/v1/pilot/{path}", headers=self.headers)

    def claim(self, **fields: Any) -> httpx.Response:
        return self.post("claim", WORKER.model_copy(update=fields))

    def event(self, event: Any) -> httpx.Response:
        return self.post("events", PilotEvent(fencing=self.fencing, event=event))

    def save(self, outcome: Outcome, *files: PilotFile) -> httpx.Response:
        return self.post("outcomes", PilotOutcome(fencing=self.fencing, outcome=outcome, files=files))

    def beat(self) -> httpx.Response:
        return self.post("heartbeat", PilotBeat(fencing=self.fencing, progress=ProgressView(fraction=0.5)))

    def end(self, end: Finish | Fail | Release) -> httpx.Response:
        return self.post("end", PilotEnd(fencing=self.fencing, end=end))


def claimed(service: Served, document: dict[str, Any] = JOB) -> tuple[Calls, Begun]:
    begun = launched(service, document)
    calls = Calls(service, begun.token)
    assert calls.claim().status_code == 200
    return calls, begun


def measured(begun: Begun) -> Result:
    """A result of the job's variant."""
    (variant,) = variants_of(begun.spec)
    known = as_measured(variant)
    assert known is not None
    return a_result().model_copy(update={"variant": summary_of(known)})


@pytest.mark.slow
def test_a_pilot_does_by_http_what_a_worker_does_in_the_database(service: Served) -> None:
    begun = launched(service)
    calls = Calls(service, begun.token)
    answer = calls.claim()
    lease = answer.json()["lease"]
    assert (lease["job_id"], lease["fencing"], lease["attempt"], lease["done"]) == (begun.job_id, 1, 1, [])
    assert JobSpec.model_validate(lease["spec"]) == begun.spec
    assert calls.get("job").json()["state"] == "running"
    for event in (
        Planned(variants=a_plan("baseline")),
        Estimated(seconds=1, limit_s=2, replicates=1, sentence="About 1 s."),
        VariantStarted(index=0),
    ):
        assert calls.event(event).status_code == 204
    assert calls.beat().json() == {"cancel_requested": False}
    result = measured(begun)
    outcome = an_outcome(result, {"tflops": ((1.5, 2.5),)})
    for _ in range(2):  # the answer to the first one was lost
        assert calls.save(outcome).status_code == 204
    assert calls.end(DONE).status_code == 204
    job = look(service.database, begun.job_id)
    assert (job.state, job.variants[0].result_id) == (JobState.SUCCEEDED, result.id)
    with service.database.read() as session:
        kinds = [event.kind for event in events.after(session, begun.job_id, 0)]
    told = ("planned", "estimated", "variant_started", "progressed", "variant_finished")
    assert kinds == ["state", "state", *told, "state"]
    samples = service.client.get(f"/v1/results/{result.id}/samples").json()["samples"]
    assert samples == {"tflops": [[1.5, 2.5]]}


@pytest.mark.slow
def test_no_worker_takes_a_job_for_a_scheduler(service: Served) -> None:
    job_id = service.submit(JOB)["id"]
    with service.database.write() as session:
        assert leases.claim(session, WORKER, 30) is None
        assert leases.claim(session, WORKER, 30, asked=job_id) is None


def test_a_claim_whose_answer_was_lost_gets_the_same_lease_and_another_pilot_none(service: Served) -> None:
    calls, _ = claimed(service)
    assert calls.claim().json()["lease"]["fencing"] == 1
    refused = calls.claim(id="another")
    assert refused.status_code == 409
    assert "is running" in refused.json()["detail"]


def test_an_old_fencing_number_changes_nothing(service: Served) -> None:
    calls, begun = claimed(service)
    calls.event(Planned(variants=a_plan("baseline")))
    with service.database.write() as session:
        leases.sweep(session, utc_now() + timedelta(hours=1))
    again = Calls(service, begun.token)
    again.fencing = again.claim(id="the next").json()["lease"]["fencing"]
    assert again.fencing == 2
    answers = [
        calls.beat(),
        calls.event(VariantStarted(index=0)),
        calls.save(an_outcome(measured(begun))),
        calls.end(DONE),
        calls.end(Release()),
    ]
    assert [answer.status_code for answer in answers] == [409] * 5
    assert again.beat().status_code == 200
    assert look(service.database, begun.job_id).variants == ()


def test_another_allocation_begins_anew(service: Served) -> None:
    """A ladder's replicates are those of one allocation."""
    calls, begun = claimed(service)
    calls.event(Planned(variants=a_plan("baseline", "other")))
    calls.save(an_outcome(measured(begun)))
    assert calls.end(Release()).status_code == 204
    lease = calls.claim().json()["lease"]
    assert (lease["attempt"], lease["done"]) == (2, [])
    calls.fencing = lease["fencing"]
    calls.event(Planned(variants=a_plan("baseline", "other")))
    assert [each.status for each in look(service.database, begun.job_id).variants] == ["pending", "pending"]


def test_the_token_ends_with_its_job(service: Served) -> None:
    calls, _ = claimed(service)
    assert calls.end(DONE).status_code == 204
    assert [calls.beat().status_code, calls.claim().status_code, calls.get("job").status_code] == [401] * 3


def test_the_token_expires_and_ends_with_its_launch(service: Served) -> None:
    calls, begun = claimed(service)
    with service.database.read() as session:
        row = session.scalars(select(LaunchRow)).one()
        lasts = row.expires_at - row.created_at
    assert timedelta(0) < lasts - timedelta(seconds=begun.spec.limits.timeout_s) < timedelta(hours=2)
    with service.database.write() as session:
        session.execute(update(LaunchRow).values(expires_at=utc_now() - timedelta(seconds=1)))
    assert calls.beat().status_code == 401
    with service.database.write() as session:
        session.execute(update(LaunchRow).values(expires_at=utc_now() + timedelta(hours=1)))
    assert calls.beat().status_code == 200
    with service.database.write() as session:
        launches.end(session, begun.id, "It ended.")
    assert calls.beat().status_code == 401


def test_the_token_opens_no_other_call_and_a_key_no_pilot_s(guarded: Served) -> None:
    with guarded.database.write() as session:
        key = keys.create(session, "admin", ["admin"])
    admin = {"Authorization": f"Bearer {key}"}
    job = guarded.client.post("/v1/jobs", json=JOB, headers=admin).json()
    with guarded.database.write() as session:
        begun = launches.begin(session, Scheduler.SLURM)
    assert begun is not None
    token = {"Authorization": f"Bearer {begun.token}"}
    place = f"/v1/jobs/{job['id']}"
    opened = [
        guarded.client.get(path, headers=token).status_code for path in ("/v1/jobs", place, "/v1/leaderboard")
    ]
    opened.append(guarded.client.post(f"{place}/cancel", headers=token).status_code)
    opened.append(guarded.client.post("/v1/jobs", json=JOB, headers=token).status_code)
    assert opened == [401] * 5
    for headers in (admin, {}):
        assert guarded.client.get("/v1/pilot/job", headers=headers).status_code == 401
    assert guarded.client.get("/v1/pilot/job", headers=token).json()["id"] == job["id"]


def test_only_the_hash_of_a_token_is_stored(service: Served) -> None:
    begun = launched(service)
    with service.database.read() as session:
        row = session.scalars(select(LaunchRow)).one()
    assert row.token_hash == hashlib.sha256(begun.token.encode()).hexdigest()
    assert begun.token not in repr(vars(row))


@pytest.mark.slow
def test_guessing_tokens_is_limited_by_address(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", rate_limit="4/day") as served:
        begun = launched(served)  # the first call of this address
        answers = [Calls(served, f"ogp_{number}").get("job").status_code for number in range(4)]
        assert answers == [401, 401, 401, 429]
        assert Calls(served, begun.token).get("job").status_code == 200


def test_a_cancel_is_told_with_the_heartbeat(service: Served) -> None:
    calls, begun = claimed(service)
    service.client.post(f"/v1/jobs/{begun.job_id}/cancel")
    assert calls.beat().json() == {"cancel_requested": True}
    assert calls.end(Finish(state=JobState.CANCELLED, reason="Cancelled on request.")).status_code == 204
    assert look(service.database, begun.job_id).state is JobState.CANCELLED


@pytest.mark.parametrize(
    "job", [JOB, {"workload": {"kind": "generate"}, "model": "bundled:tiny", "via": "slurm"}]
)
def test_a_result_of_another_workload_is_refused(job: dict[str, Any], service: Served) -> None:
    calls, begun = claimed(service, job)
    calls.event(Planned(variants=a_plan("baseline")))
    for result in (a_result(workload="matmul"), a_result()):
        assert calls.save(an_outcome(result)).status_code == 422
    taken = measured(begun)
    assert calls.save(an_outcome(taken)).status_code == 204
    other, second = claimed(service)
    other.event(Planned(variants=a_plan("baseline")))
    theirs = an_outcome(measured(second).model_copy(update={"id": taken.id}))
    assert other.save(theirs).status_code == 409
    with service.database.read() as session:
        assert session.get_one(ResultRow, taken.id).job_id == begun.job_id


def a_file(name: str, plain: bytes, **changes: Any) -> PilotFile:
    fields: dict[str, Any] = {
        "name": name,
        "media_type": "text/html",
        "size_bytes": len(plain),
        "sha256": hashlib.sha256(plain).hexdigest(),
        "data": base64.b64encode(zlib.compress(plain)).decode(),
    }
    return PilotFile.model_validate(fields | changes)


def test_a_file_is_kept_if_it_is_what_it_says(service: Served) -> None:
    calls, begun = claimed(service)
    calls.event(Planned(variants=a_plan("baseline")))
    result = measured(begun)
    trace = b"{}" * PIECE_BYTES
    files = [
        a_file("../trace.json", trace),
        a_file("short.txt", trace, size_bytes=10),
        a_file("other.txt", b"a", sha256="0" * 64),
        a_file("torn.txt", b"a", data=base64.b64encode(b"not zlib").decode()),
        PilotFile(name="lost.txt", media_type="text/plain", reason="It was too large."),
    ]
    assert calls.save(an_outcome(result), *files).status_code == 204
    with service.database.read() as session:
        kept = {each.name: each for each in results.list_artifacts(session, result.id).artifacts}
    wrong = "What came is not the file that was announced."
    assert {name: file.reason for name, file in kept.items()} == {
        "_trace.json": None,
        "short.txt": wrong,
        "other.txt": wrong,
        "torn.txt": wrong,
        "lost.txt": "It was too large.",
    }
    assert kept["_trace.json"].media_type == "application/json"
    assert b"".join(results.artifact_content(service.database, result.id, "_trace.json")) == trace


def test_no_path_that_a_pilot_names_is_read(service: Served, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the service")
    calls, begun = claimed(service)
    calls.event(Planned(variants=a_plan("baseline")))
    result = measured(begun)
    assert (
        calls.save(an_outcome(result).model_copy(update={"artifacts": {"secret": secret}})).status_code == 204
    )
    with service.database.read() as session:
        assert results.list_artifacts(session, result.id).artifacts == ()


def test_a_machine_that_does_not_suit_the_job_is_refused_and_the_launch_says_why(service: Served) -> None:
    begun = launched(service, JOB | {"device": "cuda"})
    refused = Calls(service, begun.token).claim()
    assert refused.status_code == 409
    with service.database.write() as session:
        launches.end(session, begun.id, "Slurm's job 7 ended as FAILED.")
    job = look(service.database, begun.job_id)
    assert job.launch is not None
    assert job.launch.reason == refused.json()["detail"]
    assert str(job.reason).startswith(
        "The allocation's machine (1x Test CPU) does not have what the job asks for"
    )


def test_a_pilot_of_another_version_is_refused(service: Served) -> None:
    begun = launched(service)
    answer = Calls(service, begun.token).claim(version="0.0.0")
    assert (answer.status_code, answer.json()["detail"]) == (
        409,
        f"The pilot is OptiGPU 0.0.0 and the service {__version__}; install the same one.",
    )


@pytest.mark.parametrize(
    "url", ["http://bench.example.org", "ftp://127.0.0.1", "bench.example.org", "http://10.0.0.1"]
)
def test_the_token_is_never_sent_in_the_clear(url: str) -> None:
    with pytest.raises(OptiGPUError, match="set it to https://HOST"):
        ServiceCalls(url, "ogp_secret")


def test_a_pilot_without_a_valid_token_stops(any_service: Served) -> None:
    calls = ServiceCalls(any_service.url, "ogp_unknown")
    with pytest.raises(LeaseLostError, match="unknown, revoked or expired"):
        calls.call("GET", "job")
    calls.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}") as found:
        yield found


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    folders = {name: str(tmp_path / name) for name in ("OPTIGPU_DATA_DIR", "OPTIGPU_LOCK_DIR")}
    with watched_processes(tmp_path, folders) as found:
        yield found


def started(served: Served, processes: Processes, spec: JobSpec) -> tuple[str, subprocess.Popen[bytes]]:
    """A job that was handed over, and its pilot."""
    served.submit(spec.model_dump(mode="json"))
    with served.database.write() as session:
        begun = launches.begin(session, Scheduler.SLURM)
    assert begun is not None
    assert not [name for name in VARIABLES if name in os.environ]
    handed = {"OPTIGPU_URL": served.url, "OPTIGPU_PILOT_TOKEN": begun.token}
    arguments = ("worker", "--once", "--job", begun.job_id, "--device", "cpu")
    return begun.job_id, processes.start(*arguments, **handed)


@pytest.mark.slow
def test_a_pilot_measures_its_job_and_ends(served: Served, processes: Processes) -> None:
    job_id, pilot = started(served, processes, matmul(via="slurm"))
    assert pilot.wait(120) == 0
    job = look(served.database, job_id)
    assert job.state is JobState.SUCCEEDED, job.reason
    (result,) = served.client.get(f"/v1/jobs/{job_id}/results").json()["results"]
    samples = served.client.get(f"/v1/results/{result['id']}/samples").json()["samples"]
    assert samples["latency_s"][0]


@pytest.mark.long
def test_a_pilot_opens_no_port_and_its_end_leaves_the_job_to_the_next(
    served: Served, processes: Processes
) -> None:
    job_id, pilot = started(served, processes, matmul(via="slurm", measure=ENDLESS))
    of_it = psutil.Process(pilot.pid)
    assert eventually(lambda: measuring_processes(of_it))
    for process in (of_it, *of_it.children(recursive=True)):
        assert [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN] == []
    pilot.terminate()
    assert pilot.wait(60) == 0
    job = look(served.database, job_id)
    assert (job.state, [each.outcome for each in job.attempts]) == (JobState.QUEUED, ["allocation_ended"])
    assert str(job.reason).startswith(
        "The scheduler ended the job's allocation. Nothing was measured by then."
    )
