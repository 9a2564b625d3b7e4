"""Jobs: posted once, looked at, listed in order, cancelled whenever, and what a worker leaves behind."""

import gzip
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx
import pytest

from optigpu.documents.views import ProgressView
from optigpu.job.spec import JobSpec
from optigpu.store import events, jobs, leases, outcomes, workers
from optigpu.store.database import Database
from optigpu.vocabulary import JobState, new_id
from tests.service.records import a_spec, a_worker, claimed, told
from tests.service.serving import MATMUL, Served


def test_a_posted_job_is_stored_and_can_be_looked_at(service: Served) -> None:
    posted = service.client.post("/v1/jobs", json=MATMUL)
    job = posted.json()
    assert posted.status_code == 202
    assert job["created_at"].endswith("Z")
    assert posted.headers["location"] == f"/v1/jobs/{job['id']}" == job["links"]["self"]
    assert (job["state"], job["queue_position"], job["spec"]["workload"]["sizes"]) == ("queued", None, [64])
    assert service.client.get(posted.headers["location"]).json() == job | {"queue_position": 1}


def test_a_job_with_stacks_of_another_backend_beside_its_own_is_stored_whole(service: Served) -> None:
    """Whether a worker has that backend is known when it runs the job, and ends one variant at the most."""
    beside = [
        {"backend": "llama_cpp", "stack": [{"name": "gguf", "type": "Q8_0"}], "label": "8 bits"},
        {"stack": [{"name": "bf16"}]},
    ]
    document = {"workload": {"kind": "generate"}, "model": "bundled:tiny", "beside": beside}
    job = service.client.get(service.submit(document)["links"]["self"]).json()
    assert job["state"] == "queued"
    assert [(each["backend"], each["label"]) for each in job["spec"]["beside"]] == [
        ("llama_cpp", "8 bits"),
        ("torch", None),
    ]
    assert job["spec"]["beside"][0]["stack"] == [{"name": "gguf", "type": "Q8_0", "pure": False}]
    stored = service.claim().spec
    assert stored == JobSpec.model_validate(document)


def test_the_same_idempotency_key_answers_with_the_same_job(service: Served) -> None:
    first = service.submit(MATMUL, **{"Idempotency-Key": "one"})
    assert service.submit(MATMUL, **{"Idempotency-Key": "one"})["id"] == first["id"]
    assert service.submit(MATMUL, **{"Idempotency-Key": "two"})["id"] != first["id"]
    assert service.count_jobs() == 2


def test_the_same_idempotency_key_with_another_body_is_a_conflict(service: Served) -> None:
    service.submit(MATMUL, **{"Idempotency-Key": "one"})
    other = {"workload": {"kind": "matmul", "sizes": [128]}}
    answer = service.client.post("/v1/jobs", json=other, headers={"Idempotency-Key": "one"})
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    assert service.count_jobs() == 1


def test_jobs_are_listed_newest_first_page_by_page(service: Served) -> None:
    made = [service.submit()["id"] for _ in range(5)]
    seen, cursor = [], None
    while True:
        query = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = service.client.get("/v1/jobs", params=query).json()
        seen += [job["id"] for job in page["jobs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == made[::-1]


def test_a_job_is_listed_with_its_name_and_found_by_its_whole_tags(service: Served) -> None:
    """No part of a tag is found, and no character of one is a wildcard."""
    service.submit(MATMUL | {"name": "A first look", "tags": ["paper", "zen_4"], "note": "With the new fan."})
    service.submit(MATMUL | {"tags": ["paper-draft", "zen54"]})
    for tag, names in (("paper", ["A first look"]), ("zen_4", ["A first look"]), ("pape", [])):
        found = service.client.get("/v1/jobs", params={"tag": tag}).json()["jobs"]
        assert [job["name"] for job in found] == names
    (listed,) = service.client.get("/v1/jobs?tag=paper").json()["jobs"]
    assert listed["tags"] == ["paper", "zen_4"]
    assert service.client.get(f"/v1/jobs/{listed['id']}").json()["spec"]["note"] == "With the new fan."


def test_jobs_are_filtered_by_state(service: Served) -> None:
    queued, cancelled = service.submit()["id"], service.submit()["id"]
    service.client.post(f"/v1/jobs/{cancelled}/cancel")
    listed = {
        state: [job["id"] for job in service.client.get("/v1/jobs", params={"state": state}).json()["jobs"]]
        for state in ("queued", "cancelled", "running")
    }
    assert listed == {"queued": [queued], "cancelled": [cancelled], "running": []}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs/{}"),
        ("POST", "/v1/jobs/{}/cancel"),
        ("GET", "/v1/jobs/{}/results"),
        ("GET", "/v1/results/{}"),
        ("GET", "/v1/results/{}/artifacts/trace.json"),
    ],
)
def test_what_is_not_there_is_not_found(any_service: Served, method: str, path: str) -> None:
    answer = any_service.client.request(method, path.format(new_id()))
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_id_may_be_written_in_capitals(service: Served) -> None:
    job_id = service.submit()["id"]
    assert service.client.get(f"/v1/jobs/{job_id.upper()}").json()["id"] == job_id


def test_answers_are_not_cached_and_long_ones_are_compressed(service: Served) -> None:
    for _ in range(3):
        service.submit()
    request = service.client.build_request("GET", "/v1/jobs", headers={"Accept-Encoding": "gzip"})
    answer = service.client.send(request, stream=True)
    raw = b"".join(answer.iter_raw())
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-encoding"] == "gzip"
    assert len(gzip.decompress(raw)) > len(raw)


def test_a_page_of_another_origin_cannot_change_anything(service: Served) -> None:
    job_id = service.submit()["id"]
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = service.client.post(f"/v1/jobs/{job_id}/cancel", headers=headers)
        assert answer.status_code == 403
    assert service.client.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"
    own = service.client.post(f"/v1/jobs/{job_id}/cancel", headers={"Origin": service.url})
    assert own.json()["state"] == "cancelled"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::1"])
def test_a_name_that_is_not_loopback_is_refused(any_service: Served, host: str) -> None:
    answer = any_service.client.get("/v1/jobs", headers={"Host": host})
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["field"] == "Host"


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_every_name_of_loopback_is_allowed(any_service: Served, host: str) -> None:
    assert httpx.get(f"{any_service.url}/v1/jobs", headers={"Host": host}).status_code == 200


def test_twins_that_come_at_once_create_one_job(database: Database) -> None:
    together = Barrier(8)

    def post(_: int) -> tuple[str, bool]:
        together.wait()
        with database.write() as session:
            submitted = jobs.submit(session, a_spec(), idempotency_key="key")
        return submitted.job.id, submitted.created

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(8)))
    assert len({job_id for job_id, _ in answers}) == 1
    assert sum(created for _, created in answers) == 1


def test_a_queued_job_is_cancelled_at_once_and_only_once(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        cancelled = jobs.request_cancel(session, job_id)
    with database.write() as session:
        assert jobs.request_cancel(session, job_id) == cancelled
        assert leases.claim(session, a_worker(), 30) is None
    assert cancelled.state is JobState.CANCELLED
    assert cancelled.cancel_requested_at is not None
    assert cancelled.reason == "Cancelled on request, before it began."
    with database.read() as session:
        assert [event.kind for event in events.after(session, job_id, 0)] == [
            "state",
            "cancel_requested",
            "state",
        ]


def test_a_running_job_runs_on_until_its_worker_says_that_it_has_stopped(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = claimed(session)
        assert leases.heartbeat(session, lease, 30) is False
        assert jobs.request_cancel(session, job_id).state is JobState.RUNNING
        assert leases.heartbeat(session, lease, 30) is True
        outcomes.finish(session, lease, JobState.CANCELLED, "Cancelled on request.")
        assert jobs.get(session, job_id).state is JobState.CANCELLED


def test_events_count_without_gaps_when_many_write_at_once(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id

    def write(number: int) -> int:
        with database.write() as session:
            return told(session, job_id, "note", {"number": number})

    with ThreadPoolExecutor(8) as pool:
        given = sorted(pool.map(write, range(40)))
    with database.read() as session:
        stored = events.after(session, job_id, 0)
        assert given == list(range(2, 42))
        assert [event.sequence for event in stored] == list(range(1, 42))
        assert events.after(session, job_id, 38) == stored[38:]
        assert events.after(session, job_id, 0, limit=2) == stored[:2]


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_the_progress_of_a_job_that_has_ended_is_whole(database: Database, state: JobState) -> None:
    """However it ended: an ended job has nothing to come."""
    with database.write() as session:
        jobs.submit(session, a_spec())
        workers.register(session, a_worker())
        lease = claimed(session)
        leases.heartbeat(session, lease, 60, ProgressView(fraction=0.4, doing="measuring", remaining_s=60))
        assert jobs.get(session, lease.job_id).progress.fraction == 0.4
        outcomes.finish(session, lease, state, "As told.")
        ended = jobs.get(session, lease.job_id).progress
    assert (ended.fraction, ended.doing, ended.remaining_s) == (1.0, None, 0.0)
