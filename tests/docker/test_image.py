"""The image as it was built, what Compose reads of our files, and Prometheus beside it; Grafana is no package."""

import tomllib
from typing import Any

import httpx
import pytest

from tests.deploy.compose import ROOT
from tests.deploy.gpu_host import LISTED, NVIDIA_SMI
from tests.docker.conftest import Deployed
from tests.docker.host import Host

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
ADDRESSES = "OPTIGPU_DATABASE_URL=postgresql://elsewhere/o OPTIGPU_REDIS_URL=rediss://elsewhere/0"
SECRETS = "GRAFANA_PASSWORD=secret PROMETHEUS_KEY=secret"
CREATE = "docker compose exec -T api python -m api keys create prometheus --scope read 2>/dev/null"
COMPOSE = "docker compose --file docker-compose.monitoring.yml"


@pytest.mark.docker
def test_the_command_is_there_and_says_its_version(host: Host, deployed: Deployed) -> None:
    assert VERSION in host.shell("docker run --rm optigpu optigpu --version")
    assert "usage" in host.shell("docker run --rm optigpu hf download --help").lower()


@pytest.mark.docker
def test_another_version_than_the_project_s_ends_a_build(host: Host, deployed: Deployed) -> None:
    """The check of the Dockerfile, with a project that has a later version than the image."""
    (host.folder / "later.toml").write_text('[project]\nversion = "99.9"\n')
    mounts = [
        f"{host.checkout}/tools/image_check.py:/tmp/image_check.py:ro",
        f"{host.checkout}/later.toml:/tmp/later.toml:ro",
    ]
    volumes = [option for mount in mounts for option in ("--volume", mount)]
    check = ["python", "/tmp/image_check.py", "--torch", deployed.settings["TORCH"]]
    check += ["--cuda", "13.0", "--project", "/tmp/later.toml"]
    done = host.run("docker", "run", "--rm", *volumes, "optigpu", *check, check=False)
    (host.folder / "later.toml").unlink()
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"`optigpu --version` does not say '99.9' but 'optigpu {VERSION}'."


NO_NETWORK = """
services:
  api: {build: {network: none, args: {TORCH_INDEX: http://index.invalid/simple}}}
"""


@pytest.mark.docker
def test_without_a_network_the_build_ends_with_a_sentence(host: Host, deployed: Deployed) -> None:
    """The base is there; the dependencies are wanted anew, because an argument has changed."""
    (host.folder / "no-network.yml").write_text(NO_NETWORK)
    files = ["--file", "docker-compose.yml", "--file", "no-network.yml"]
    done = host.run("docker", "compose", *files, "build", "api", check=False)
    (host.folder / "no-network.yml").unlink()
    assert done.returncode != 0
    assert (
        "The dependencies were not installed: read the error above. This step needs a network" in done.stdout
    )


@pytest.fixture(scope="module")
def gpus(host: Host) -> str:
    """A folder with an `nvidia-smi` that lists three GPUs."""
    folder = host.root / "tmp" / "gpus"
    folder.mkdir()
    (folder / "listed").write_text(LISTED["mixed"])
    (folder / "modes").touch()
    program = folder / "nvidia-smi"
    program.write_text(
        NVIDIA_SMI.format(listed="/tmp/gpus/listed", modes="/tmp/gpus/modes", status=0, driver="580.65.06")
    )
    program.chmod(0o755)
    return "/tmp/gpus"


@pytest.mark.docker
@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.worker.yml"])
def test_compose_reads_a_file_with_a_worker_for_each_gpu(host: Host, gpus: str, file: str) -> None:
    try:
        host.shell(f"PATH={gpus}:$PATH python3 -m tools.gpu_services --base {file}")
        listed = host.shell(
            f"{ADDRESSES} docker compose --file {file} --file docker-compose.gpus.yml config --services"
        )
        assert {"worker-cpu", "worker-gpu-0", "worker-gpu-1", "worker-gpu-2"} <= set(listed.split())
    finally:
        host.shell("python3 -m tools.gpu_services --gpu none")


@pytest.mark.docker
def test_compose_reads_the_file_of_the_monitoring(host: Host) -> None:
    listed = host.shell(f"{SECRETS} docker compose --file docker-compose.monitoring.yml config --services")
    assert set(listed.split()) == {"prometheus", "grafana"}


@pytest.mark.docker
@pytest.mark.parametrize("secret", ["POSTGRES_PASSWORD", "OPTIGPU_API_KEY"])
def test_a_secret_that_is_missing_is_named_with_what_to_do(host: Host, secret: str) -> None:
    done = host.run(
        "sh", "-c", f"{secret}= docker compose --file docker-compose.yml config --quiet", check=False
    )
    assert done.returncode != 0
    assert f"required variable {secret} is missing a value: put it in .env" in done.stdout


def asked(path: str) -> Any:
    return httpx.get(f"http://127.0.0.1:9090/api/v1/{path}", trust_env=False).json()["data"]


@pytest.mark.slow
@pytest.mark.docker
def test_prometheus_scrapes_the_api_and_evaluates_the_alerts(deployed: Deployed) -> None:
    key = deployed.host.shell(CREATE).strip()
    with (deployed.host.folder / ".env").open("a") as env:
        env.write(f"PROMETHEUS_KEY={key}\nGRAFANA_PASSWORD=secret\n")
    deployed.host.shell(f"{COMPOSE} up --detach prometheus")
    try:
        deployed.wait_until(
            "Prometheus has read /metrics", lambda: [t["health"] for t in targets()] == ["up"]
        )
        deployed.wait_until("it has evaluated the alerts", lambda: {r["health"] for r in rules()} == {"ok"})
        assert len(rules()) >= 9
    finally:
        deployed.host.shell(f"{COMPOSE} down --volumes")


def targets() -> list[dict[str, Any]]:
    try:
        return list(asked("targets")["activeTargets"])
    except httpx.TransportError:
        return []


def rules() -> list[dict[str, Any]]:
    return [rule for group in asked("rules")["groups"] for rule in group["rules"]]
