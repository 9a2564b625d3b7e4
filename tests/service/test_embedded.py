"""The service as a user starts it: embedded by one command, or beside two workers; nothing is left when it ends."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from optigpu.client import Client
from tests.servers.postgres import fresh_database
from tests.service.processes import Processes, eventually, stop, watched_processes
from tests.service.test_api_process import address
from tests.service.workers import matmul, migrated

pytestmark = pytest.mark.slow

QUICK = {"replicates": 1, "min_seconds": 0.05, "max_seconds": 1, "rel_ci": 1}
AT_ONCE = {"wait_for_quiet_s": 0}
MATMUL = {"workload": {"kind": "matmul", "sizes": [64]}, "device": "cpu", "measure": QUICK, "limits": AT_ONCE}
LONG = {
    "workload": {"kind": "matmul", "sizes": [2048]},
    "device": "cpu",
    "measure": {"replicates": 1, "min_seconds": 300, "max_seconds": 600},
    "limits": AT_ONCE,
}
MEASURED_WITHIN_S = 240.0


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Where `python -m api` is started; at the end nothing of its tree may be left."""
    variables = {
        "OPTIGPU_DATABASE_URL": f"sqlite:///{tmp_path / 'optigpu.db'}",
        "OPTIGPU_DATA_DIR": str(tmp_path),
        "OPTIGPU_POLL_S": "0.2",
    }
    with watched_processes(tmp_path, variables) as watched:
        yield watched


def test_a_job_is_posted_followed_and_ranked(processes: Processes) -> None:
    process = processes.start("api", "--port", "0")
    with Client(address(processes)) as client:
        job = client.submit(MATMUL)
        kinds = [event.kind for event in client.events(job.id)]
        assert kinds[0] == kinds[-1] == "state"
        assert {"planned", "variant_started", "variant_finished"} <= set(kinds)
        assert client.job(job.id).state == "succeeded"
        (row,) = client.leaderboard_rows(metric="tflops")
        assert row.job_id == job.id
        assert row.value.value is not None
        assert row.value.value > 0
        (worker,) = client.workers()
        assert worker.alive
        assert any(client.samples(row.result_id).samples["tflops"])
    interrupt(process)


def test_a_worker_that_dies_is_started_again_and_ctrl_c_while_it_measures_leaves_nothing(
    processes: Processes,
) -> None:
    process = processes.start("api", "--port", "0")
    address(processes)
    first = eventually(lambda: worker_of(process.pid))
    assert first is not None
    first.kill()
    assert eventually(lambda: worker_of(process.pid) not in (None, first))
    begin_to_measure(processes)
    interrupt(process)


@pytest.mark.long
def test_the_worker_ends_when_the_service_is_killed(processes: Processes) -> None:
    process = processes.start("api", "--port", "0")
    begin_to_measure(processes)
    process.kill()
    process.wait()
    assert eventually(lambda: not processes.alive())


def begin_to_measure(processes: Processes) -> None:
    """Posts a job that would run for minutes, and waits until one of its processes is at work."""
    url = address(processes)
    job = httpx.post(f"{url}/v1/jobs", json=LONG, timeout=30).json()

    def measuring() -> bool:
        variants = httpx.get(f"{url}{job['links']['self']}", timeout=30).json()["variants"]
        return any(variant["status"] == "running" for variant in variants)

    assert eventually(measuring, MEASURED_WITHIN_S)
    assert eventually(lambda: len(processes.alive()) >= 3), "the service, its worker, and what measures"


def worker_of(pid: int) -> psutil.Process | None:
    """The service's worker; None while there is none, as before it has become another program than the service."""
    return next(filter(is_worker, psutil.Process(pid).children()), None)


def is_worker(child: psutil.Process) -> bool:
    """A killed process that was not waited for yet has no command line any more."""
    try:
        return bool(child.cmdline()[1:3] == ["-m", "worker"])
    except psutil.NoSuchProcess:  # zombies among them
        return False


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C; it must end well. That nothing is left is checked by the fixture."""
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


JOBS = 3


@pytest.fixture
def beside_servers(tmp_path: Path, postgres_server_url: str, redis_url: str) -> Iterator[Processes]:
    with fresh_database(postgres_server_url) as url, migrated(url):
        variables = {
            "OPTIGPU_DATABASE_URL": url,
            "OPTIGPU_REDIS_URL": redis_url,
            "OPTIGPU_DATA_DIR": str(tmp_path),
            "OPTIGPU_RATE_LIMIT": "1000000/minute",
        }
        with watched_processes(tmp_path, variables) as beside_servers:
            yield beside_servers


def test_jobs_are_run_once_each_by_two_workers(beside_servers: Processes) -> None:
    api = beside_servers.start("api", "--port", "0")
    both = [beside_servers.start("worker", "--device", "cpu") for _ in range(2)]
    url = eventually(lambda: re.search(r"listens on (http://\S+)", beside_servers.printed()))
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
    logged = [json.loads(line) for line in beside_servers.printed().splitlines() if line.startswith("{")]
    succeeded = [line["job_id"] for line in logged if line["event"] == "job.succeeded"]
    assert sorted(succeeded) == sorted(posted)
    assert {line["job_id"] for line in logged if line["event"].startswith(("job.", "variant."))} == posted
    requests = [line for line in logged if line["event"] == "request"]
    assert all(line["request_id"] for line in requests)
    assert {line["job_id"] for line in requests if line["method"] == "POST"} == posted


def states(client: httpx.Client) -> dict[str, str]:
    return {job["id"]: job["state"] for job in client.get("/v1/jobs").json()["jobs"]}
