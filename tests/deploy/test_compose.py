"""docker-compose.yml cannot rot unseen: its services run here as plain processes.

Each service runs by its own command and with its own environment, against a real PostgreSQL and a real
Redis. Replaced are hosts and ports, the number of Redis's database (the server may be shared), the folders
that the volumes mount and the interpreter's path. The GPU worker does not run: its reservation of a GPU is
only parsed. No image is built.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest
from dotenv import dotenv_values
from sqlalchemy import URL, make_url

from tests.deploy.compose import REFERENCE, ROOT, read_compose
from tests.deploy.services import Deployment, is_ready, read
from tests.servers.postgres import fresh_database, libpq

START_TIMEOUT_S = 60
JOB_TIMEOUT_S = 120
ENDED = ("succeeded", "failed", "cancelled")
MATMUL = {
    "workload": {"kind": "matmul", "sizes": [64], "dtypes": ["float32"]},
    "device": "cpu",
    "measure": {"replicates": 1, "min_seconds": 0.05, "max_seconds": 1, "rel_ci": 1, "meters": ["latency"]},
    "limits": {"wait_for_quiet_s": 0},
}


@pytest.fixture
def compose() -> dict[str, Any]:
    return read_compose({"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"})


def test_every_service_is_there(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"postgres", "redis", "migrate", "api", "worker", "worker-cpu"}


@pytest.mark.parametrize("secret", ["POSTGRES_PASSWORD", "OPTIGPU_API_KEY"])
def test_a_secret_has_no_default(secret: str) -> None:
    with pytest.raises(ValueError, match=secret):
        read_compose({"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"} | {secret: ""})


def test_the_example_of_env_names_what_the_file_asks_for_and_holds_no_secret() -> None:
    example = dotenv_values(ROOT / ".env.example")
    text = (ROOT / "docker-compose.yml").read_text()
    assert set(example) == {reference["name"] for reference in REFERENCE.finditer(text)}
    assert not example["POSTGRES_PASSWORD"]
    assert not example["OPTIGPU_API_KEY"]


def test_the_gpu_worker_reserves_every_nvidia_gpu(compose: dict[str, Any]) -> None:
    reservation = compose["services"]["worker"]["deploy"]["resources"]["reservations"]
    assert reservation == {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}
    print("The reservation of a GPU was parsed only: no container was started with one.")


def test_the_two_workers_differ_in_their_device_alone(compose: dict[str, Any]) -> None:
    gpu, cpu = (dict(compose["services"][name]) for name in ("worker", "worker-cpu"))
    assert gpu.pop("command") == ["python", "-m", "worker", "--device", "cuda"]
    assert cpu.pop("command") == ["python", "-m", "worker", "--device", "cpu"]
    gpu.pop("deploy")
    assert gpu == cpu


def test_both_workers_see_the_same_locks(compose: dict[str, Any]) -> None:
    folder = compose["services"]["worker"]["environment"]["OPTIGPU_LOCK_DIR"]
    for name in ("worker", "worker-cpu"):
        assert f"locks:{folder}" in compose["services"][name]["volumes"]
    assert set(compose["volumes"]) == {"postgres", "data", "locks"}


def test_nothing_starts_before_what_it_needs(compose: dict[str, Any]) -> None:
    needs = {
        name: {needed: how["condition"] for needed, how in definition.get("depends_on", {}).items()}
        for name, definition in compose["services"].items()
    }
    ready = {"migrate": "service_completed_successfully", "redis": "service_healthy"}
    assert needs == {
        "postgres": {},
        "redis": {},
        "migrate": {"postgres": "service_healthy"},
        "api": ready,
        "worker": ready,
        "worker-cpu": ready,
    }
    for name in ("postgres", "redis", "api"):
        assert "test" in compose["services"][name]["healthcheck"]


@pytest.fixture
def database(postgres_server_url: str) -> Iterator[URL]:
    """A database and a role of its own, as the postgres service would make them from its environment."""
    role, password = f"optigpu_test_{uuid4().hex}", uuid4().hex
    with psycopg.connect(libpq(postgres_server_url), autocommit=True) as server:
        server.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password}'")
        try:
            with fresh_database(postgres_server_url) as url:
                with psycopg.connect(libpq(url), autocommit=True) as connection:
                    connection.execute(f"GRANT ALL ON SCHEMA public TO {role}")
                yield make_url(url).set(username=role, password=password)
        finally:
            server.execute(f"DROP ROLE {role}")


@pytest.fixture
def deployment(database: URL, redis_url: str, tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(database, redis_url, tmp_path, api_key=uuid4().hex)
    yield deployment
    deployment.kill()


@pytest.mark.slow
def test_a_job_goes_through_the_services_as_the_file_runs_them(deployment: Deployment) -> None:
    deployment.start("migrate")
    assert deployment.status("migrate", START_TIMEOUT_S) == 0, deployment.logs()
    deployment.start("api")
    deployment.wait_until("the API is ready", is_ready, START_TIMEOUT_S)
    deployment.start("worker-cpu")
    deployment.wait_until("the worker is registered", a_cpu_worker_lives, START_TIMEOUT_S)

    posted = deployment.client.post("/v1/jobs", json=MATMUL)
    assert posted.status_code == 202, posted.text
    job = posted.json()["id"]
    deployment.wait_until("the job has ended", lambda client: state(client, job) in ENDED, JOB_TIMEOUT_S)
    assert state(deployment.client, job) == "succeeded", deployment.logs()
    leaderboard = read(deployment.client, "/v1/leaderboard?workload=matmul&metric=tflops")
    assert {row["job_id"] for board in leaderboard["boards"] for row in board["rows"]} == {job}

    processes = deployment.family()
    assert {name: deployment.stop(name) for name in ("worker-cpu", "api")} == {"worker-cpu": 0, "api": 0}
    assert [process for process in processes if process.is_running()] == []
    assert "Traceback" not in deployment.logs(), deployment.logs()


def a_cpu_worker_lives(client: httpx.Client) -> bool:
    workers = read(client, "/v1/workers")["workers"]
    return any(worker["device"] == "cpu" and worker["alive"] for worker in workers)


def state(client: httpx.Client, job: str) -> Any:
    return read(client, f"/v1/jobs/{job}")["state"]
