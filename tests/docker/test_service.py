"""docker-compose.yml as its user runs it: `make up`, a job over HTTP, restarts, backup and restore, `make down`."""

from typing import Any

import pytest

from tests.deploy.test_gpu_box import commands
from tests.docker.conftest import JOB, Deployed

pytestmark = pytest.mark.docker

UNKNOWN = "OPTIGPU_PUBLIC_RAED"


@pytest.fixture(scope="module")
def job(deployed: Deployed) -> str:
    """A job that the worker has measured."""
    return deployed.measured(JOB)


def test_make_up_says_where_it_listens_and_which_workers_there_are(deployed: Deployed) -> None:
    assert "OptiGPU listens on http://127.0.0.1:8000" in deployed.said
    assert (
        "No worker for a GPU: no NVIDIA GPU or MIG slice found; the worker for the CPU starts."
        in deployed.said
    )


def test_every_service_becomes_healthy(deployed: Deployed) -> None:
    deployed.wait_until_healthy()
    assert set(deployed.health()) == {"postgres", "redis", "api", "worker-cpu"}


def test_a_job_of_a_trained_model_is_measured_and_ranked(deployed: Deployed, job: str) -> None:
    (result,) = results_of(deployed, job)
    assert result["facts"]["dtype"] == "float32"
    assert result["metrics"]["kld_mean"]["value"] < 1e-5
    assert deployed.ranked() == {job}


def results_of(deployed: Deployed, job: str) -> list[dict[str, Any]]:
    listed = deployed.get(f"/v1/jobs/{job}/results")["results"]
    return [deployed.get(f"/v1/results/{each['id']}") for each in listed]


def test_the_result_names_the_image_and_its_commit(deployed: Deployed, job: str) -> None:
    (result,) = results_of(deployed, job)
    commit = deployed.host.run("git", "rev-parse", "HEAD").stdout.strip()
    assert result["environment"]["image"] == "optigpu"
    assert result["environment"]["git_revision"] == commit


def test_programs_run_as_a_user_who_may_write_only_what_is_kept(deployed: Deployed) -> None:
    assert deployed.inside("worker-cpu", "id -u") == "1000"
    assert deployed.inside("api", "id -u") == "1000"
    for folder in ("data", "cache", "hub", "locks"):
        deployed.inside("worker-cpu", f"touch /var/lib/optigpu/{folder}/written")
    for folder in ("models", "datasets"):
        assert "Read-only file system" in deployed.inside(
            "worker-cpu", f"touch /srv/{folder}/written 2>&1 || true"
        )
    assert "Permission denied" in deployed.inside("worker-cpu", "touch /app/written 2>&1 || true")


def test_a_secret_reaches_only_the_program_that_needs_it(deployed: Deployed) -> None:
    key = deployed.settings["OPTIGPU_API_KEY"]
    assert deployed.inside("api", "printenv OPTIGPU_API_KEY") == key
    assert deployed.inside("worker-cpu", "printenv OPTIGPU_API_KEY") == ""
    assert deployed.client.get("/v1/jobs", headers={"Authorization": "Bearer wrong"}).status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize("service", ["redis", "postgres", "api", "worker-cpu"])
def test_a_service_is_restarted_and_nothing_is_lost(deployed: Deployed, job: str, service: str) -> None:
    deployed.host.run("docker", "compose", "restart", service)
    deployed.wait_until_healthy()
    assert deployed.ranked() == {job}


@pytest.mark.slow
def test_a_backup_is_restored_by_the_commands_of_the_page(deployed: Deployed, job: str) -> None:
    before = deployed.ranked()
    deployed.host.shell(commands("backup with docker"))
    deployed.host.shell("docker compose run --rm migrate alembic downgrade base")  # the loss
    deployed.host.shell(commands("restore with docker"))
    deployed.wait_until_healthy()
    assert deployed.ranked() == before
    assert deployed.measured(JOB | {"fresh": True})


@pytest.mark.slow
def test_after_make_down_and_make_up_the_data_is_there_and_a_misspelt_setting_is_named(
    deployed: Deployed, job: str
) -> None:
    before = deployed.ranked()
    deployed.host.shell("make down")
    assert deployed.host.run("docker", "ps", "--quiet").stdout == ""
    with (deployed.host.folder / ".env").open("a") as env:
        env.write(f"{UNKNOWN}=true\n")
    assert "OptiGPU listens on" in deployed.host.shell("make up")
    deployed.wait_until_healthy()
    assert deployed.ranked() == before
    for service in ("api", "worker-cpu"):
        assert UNKNOWN in deployed.host.run("docker", "compose", "logs", service).stdout


@pytest.mark.slow
def test_a_volume_of_another_owner_is_named(deployed: Deployed) -> None:
    owned = (
        "docker compose run --rm --no-deps --user root worker-cpu chown --recursive {} /var/lib/optigpu/data"
    )
    deployed.host.shell(owned.format("root:root"))
    try:
        done = deployed.host.run("docker", "compose", "run", "--rm", "--no-deps", "worker-cpu", check=False)
    finally:
        deployed.host.shell(owned.format("optigpu:optigpu"))
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == (
        "python -m worker: No temporary directory for the measuring process can be made in "
        "/var/lib/optigpu/data (Permission denied): give the folder of OPTIGPU_DATA_DIR to the user that the "
        "worker runs as."
    )
