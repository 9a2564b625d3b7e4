"""docker-compose.yml cannot rot unseen: its services run here as plain processes.

Each service runs by its own command and with its own environment, against a real PostgreSQL and a real
Redis. Replaced are hosts and ports, the number of Redis's database (the server may be shared), the folders
that the volumes mount and the interpreter's path. No image is built, and no container is started.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest
from dotenv import dotenv_values
from sqlalchemy import URL, make_url

from optigpu.variables import KNOWN
from tests.deploy.compose import ONE_HOST, REFERENCE, ROOT, WORKERS, parse_compose, read_compose
from tests.deploy.compose_keys import wrong_keys
from tests.deploy.services import Deployment, is_ready, read
from tests.pages import SETTINGS
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
SECRETS = {"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"}
ADDRESSES = {"OPTIGPU_DATABASE_URL": "postgresql://elsewhere/o", "OPTIGPU_REDIS_URL": "rediss://elsewhere/0"}
FILES = ((ONE_HOST, ".env.example", SECRETS), (WORKERS, ".env.worker.example", ADDRESSES))
EACH_FILE = pytest.mark.parametrize(("file", "example", "needed"), FILES, ids=[file for file, *_ in FILES])
FIXED = {
    *("OPTIGPU_DATABASE_URL", "OPTIGPU_REDIS_URL", "OPTIGPU_DATA_DIR", "OPTIGPU_LOCK_DIR"),
    "OPTIGPU_HEARTBEAT_FILE",
    *("OPTIGPU_HOST", "OPTIGPU_PORT"),  # by the command; PUBLISH_HOST and PUBLISH_PORT are the host's
    *("OPTIGPU_IMAGE", "OPTIGPU_REVISION"),  # by the image
    *("OPTIGPU_MODELS_DIR", "OPTIGPU_DATASETS_DIR"),  # mounted
}
NOT_IN_A_CONTAINER = {"OPTIGPU_URL", *(name for name in KNOWN if name.startswith("OPTIGPU_TEST_"))}
"""Settings of the command line and of the tests."""


@pytest.fixture
def compose() -> dict[str, Any]:
    return read_compose(SECRETS)


def test_every_service_is_there(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"postgres", "redis", "migrate", "api", "worker-cpu"}
    assert set(read_compose(ADDRESSES, WORKERS)["services"]) == {"worker-cpu"}


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_has_no_default(secret: str) -> None:
    with pytest.raises(ValueError, match=secret):
        read_compose(SECRETS | {secret: ""})


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_has_no_default_on_a_host_with_workers_alone(address: str) -> None:
    with pytest.raises(ValueError, match=rf"{address}: .*\.env\.worker\.example"):
        read_compose(ADDRESSES | {address: ""}, WORKERS)


def documented_settings() -> list[str]:
    """The variables of the table of settings."""
    return re.findall(r"^\| `(OPTIGPU_\w+)` \|", SETTINGS.read_text(), re.MULTILINE)


@EACH_FILE
def test_the_example_of_env_names_what_the_file_asks_for_and_holds_no_secret(
    file: str, example: str, needed: dict[str, str]
) -> None:
    shown = dotenv_values(ROOT / example)
    asked = {reference["name"] for reference in REFERENCE.finditer((ROOT / file).read_text())} - {None}
    assert asked <= set(shown)
    assert set(shown) - asked <= {"COMPOSE_FILE", "HF_TOKEN", "HF_HUB_OFFLINE", *documented_settings()}
    assert shown["COMPOSE_FILE"] == f"{file}:docker-compose.gpus.yml"
    assert not any(shown.get(secret) for secret in (*SECRETS, "HF_TOKEN"))


@EACH_FILE
def test_every_key_is_one_of_the_compose_specification(
    file: str, example: str, needed: dict[str, str]
) -> None:
    assert wrong_keys(read_compose(needed, file)) == []


def test_a_wrong_key_is_named_with_its_place_and_with_what_is_meant() -> None:
    text = (ROOT / ONE_HOST).read_text()
    for right, wrong in (("shm_size:", "shm_sise:"), ("  retries: 2", "  retrys: 2")):
        assert right in text
        text = text.replace(right, wrong)
    text = text.replace("hub:/var/lib/optigpu/hub", "huub:/var/lib/optigpu/hub")
    assert wrong_keys(parse_compose(text, SECRETS)) == [
        "services.worker-cpu.shm_sise is not a key of the compose specification. Did you mean shm_size?",
        "services.worker-cpu.healthcheck.retrys is not a key of the compose specification. Did you mean retries?",
        "services.worker-cpu.volumes: there is no volume huub.",
    ]


@EACH_FILE
def test_every_setting_reaches_its_program_or_is_fixed(
    file: str, example: str, needed: dict[str, str]
) -> None:
    """What the table of settings lists; of the API where the file has one, and of the worker."""
    services = read_compose(needed, file)["services"]
    for name in ("api", "worker-cpu"):
        if name not in services:
            continue
        for setting in set(documented_settings()) - FIXED - NOT_IN_A_CONTAINER - {"OPTIGPU_API_KEY"}:
            given = read_compose(needed | {setting: "given"}, file)["services"][name]["environment"]
            assert given[setting] == "given", f"{setting} does not reach {name}"
    assert set(documented_settings()) >= FIXED | NOT_IN_A_CONTAINER


def test_a_secret_reaches_only_the_program_that_needs_it(compose: dict[str, Any]) -> None:
    services = read_compose(SECRETS | {"HF_TOKEN": "token"})["services"]
    keys = {name: services[name]["environment"]["OPTIGPU_API_KEY"] for name in ("api", "worker-cpu")}
    assert keys == {"api": "key", "worker-cpu": ""}
    tokens = {name: services[name]["environment"]["HF_TOKEN"] for name in ("api", "worker-cpu")}
    assert tokens == {"api": "", "worker-cpu": "token"}
    assert "HF_TOKEN" not in services["postgres"]["environment"]


@EACH_FILE
def test_folders_of_the_host_are_mounted_read_only_if_they_are_named(
    file: str, example: str, needed: dict[str, str]
) -> None:
    named = {"OPTIGPU_MODELS_DIR": "/data/models", "OPTIGPU_DATASETS_DIR": "/data/texts"}
    worker = read_compose(needed | named, file)["services"]["worker-cpu"]
    assert {"/data/models:/srv/models:ro", "/data/texts:/srv/datasets:ro"} <= set(worker["volumes"])
    assert worker["environment"]["OPTIGPU_MODELS_DIR"] == "/srv/models"
    assert worker["environment"]["OPTIGPU_DATASETS_DIR"] == "/srv/datasets"
    unnamed = read_compose(needed, file)["services"]["worker-cpu"]
    assert {"models:/srv/models:ro", "datasets:/srv/datasets:ro"} <= set(unnamed["volumes"])
    assert (
        unnamed["environment"]["OPTIGPU_MODELS_DIR"] == unnamed["environment"]["OPTIGPU_DATASETS_DIR"] == ""
    )


def test_workers_differ_between_the_files_in_where_the_servers_are_alone(compose: dict[str, Any]) -> None:
    here = dict(compose["services"]["worker-cpu"])
    there = dict(read_compose(ADDRESSES, WORKERS)["services"]["worker-cpu"])
    assert set(there["volumes"]) - set(here["volumes"]) == {"certificates:/etc/optigpu/certificates:ro"}
    assert set(here.pop("depends_on")) == {"migrate", "redis"}
    for worker in (here, there):
        worker["volumes"] = [each for each in worker["volumes"] if "certificates" not in each]
        worker["environment"] = set(worker["environment"]) - {*SECRETS, *ADDRESSES}
    assert here == there


@EACH_FILE
def test_what_a_worker_keeps_lies_on_volumes(file: str, example: str, needed: dict[str, str]) -> None:
    """The folders of the Dockerfile, where its programs put their files."""
    mounted = {each.split(":")[1] for each in read_compose(needed, file)["services"]["worker-cpu"]["volumes"]}
    lines = (ROOT / "Dockerfile").read_text()
    folders = dict(re.findall(r"\b(OPTIGPU_DATA_DIR|OPTIGPU_LOCK_DIR|XDG_CACHE_HOME|HF_HOME)=(\S+)", lines))
    assert len(folders) == 4
    assert set(folders.values()) <= mounted
    made = lines[lines.index("install --directory") : lines.index("COPY --from")]
    assert set(folders.values()) <= set(made.split()), "a new volume takes its owner from the image's folder"


@EACH_FILE
def test_logs_are_rotated(file: str, example: str, needed: dict[str, str]) -> None:
    for name, service in read_compose(needed, file)["services"].items():
        assert service["logging"]["driver"] == "json-file", name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
        assert all(isinstance(value, str) for value in service["logging"]["options"].values()), name


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
        "worker-cpu": ready,
    }
    for name in ("postgres", "redis", "api", "worker-cpu"):
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
