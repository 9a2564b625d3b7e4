"""Service mode: the API and two workers as plain processes, on PostgreSQL and Redis."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.servers.postgres import fresh_database
from tests.service.processes import Processes, eventually, stop, watched_processes
from tests.service.workers import matmul, migrated

pytestmark = pytest.mark.slow

JOBS = 4


@pytest.fixture
def processes(tmp_path: Path, postgres_server_url: str, redis_url: str) -> Iterator[Processes]:
    with fresh_database(postgres_server_url) as url, migrated(url):
        variables = {
            "OPTIGPU_DATABASE_URL": url,
            "OPTIGPU_REDIS_URL": redis_url,
            "OPTIGPU_DATA_DIR": str(tmp_path),
            "OPTIGPU_RATE_LIMIT": "1000000/minute",
        }
        with watched_processes(tmp_path, variables) as processes:
            yield processes


def test_jobs_are_run_once_each_by_two_workers(processes: Processes) -> None:
    api = processes.start("api", "--port", "0")
    both = [processes.start("worker", "--device", "cpu") for _ in range(2)]
    url = eventually(lambda: re.search(r"listens on (http://\S+)", processes.printed()))
    assert url
    with httpx.Client(base_url=url[1], timeout=30) as client:
        assert eventually(lambda: len(client.get("/v1/workers").json()["workers"]) == 2)
        body = matmul().model_dump(mode="json")
        posted = {client.post("/v1/jobs", json=body).json()["id"] for _ in range(JOBS)}
        assert eventually(lambda: states(client) == dict.fromkeys(posted, "succeeded"), within_s=200)
        jobs = [client.get(f"/v1/jobs/{job_id}").json() for job_id in posted]
        assert [[attempt["outcome"] for attempt in job["attempts"]] for job in jobs] == [["succeeded"]] * JOBS
        assert len({job["attempts"][0]["worker_id"] for job in jobs}) == 2
        stored = [client.get(f"/v1/jobs/{job_id}/results").json() for job_id in posted]
        assert [len(document["results"]) for document in stored] == [1] * JOBS
    for process in (*both, api):
        stop(process)
    logged = [json.loads(line) for line in processes.printed().splitlines() if line.startswith("{")]
    succeeded = [line["job_id"] for line in logged if line["event"] == "job.succeeded"]
    assert sorted(succeeded) == sorted(posted)
    assert {line["job_id"] for line in logged if line["event"].startswith(("job.", "variant."))} == posted
    requests = [line for line in logged if line["event"] == "request"]
    assert all(line["request_id"] for line in requests)
    assert {line["job_id"] for line in requests if line["method"] == "POST"} == posted


def states(client: httpx.Client) -> dict[str, str]:
    return {job["id"]: job["state"] for job in client.get("/v1/jobs").json()["jobs"]}
