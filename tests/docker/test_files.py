"""Docker Compose reads each of our files, and the one that `make up` writes for the GPUs of a host."""

import pytest

from tests.deploy.gpu_host import NVIDIA_SMI, OUTPUTS
from tests.docker.host import Host

pytestmark = pytest.mark.docker

ADDRESSES = "OPTIGPU_DATABASE_URL=postgresql://elsewhere/o OPTIGPU_REDIS_URL=rediss://elsewhere/0"
SECRETS = "GRAFANA_PASSWORD=secret PROMETHEUS_KEY=secret"


@pytest.fixture(scope="module")
def gpus(host: Host) -> str:
    """A folder with an `nvidia-smi` that lists three GPUs."""
    folder = host.root / "tmp" / "gpus"
    folder.mkdir()
    (folder / "listed").write_text((OUTPUTS / "mixed.txt").read_text())
    (folder / "modes").touch()
    program = folder / "nvidia-smi"
    program.write_text(
        NVIDIA_SMI.format(listed="/tmp/gpus/listed", modes="/tmp/gpus/modes", status=0, driver="580.65.06")
    )
    program.chmod(0o755)
    return "/tmp/gpus"


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


def test_compose_reads_the_file_of_the_monitoring(host: Host) -> None:
    listed = host.shell(f"{SECRETS} docker compose --file docker-compose.monitoring.yml config --services")
    assert set(listed.split()) == {"prometheus", "grafana"}


@pytest.mark.parametrize("secret", ["POSTGRES_PASSWORD", "OPTIGPU_API_KEY"])
def test_a_secret_that_is_missing_is_named_with_what_to_do(host: Host, secret: str) -> None:
    done = host.run(
        "sh", "-c", f"{secret}= docker compose --file docker-compose.yml config --quiet", check=False
    )
    assert done.returncode != 0
    assert f"required variable {secret} is missing a value: put it in .env" in done.stdout
