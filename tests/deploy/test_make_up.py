"""`make up`, `make workers` and `make down` on hosts with and without Docker and GPUs; both are stand-ins."""

import stat
from pathlib import Path

import pytest
import yaml

from tests.deploy.gpu_host import LISTED, UNREACHABLE, GpuHost


@pytest.fixture
def host(tmp_path: Path) -> GpuHost:
    return GpuHost(tmp_path)


def services(host: GpuHost) -> list[str]:
    """The services of the file that was written."""
    return list(yaml.safe_load((host.folder / "docker-compose.gpus.yml").read_text())["services"])


UP = "docker compose --file docker-compose.yml --file docker-compose.gpus.yml up --build --detach --remove-orphans"


@pytest.mark.parametrize(
    ("is_there", "said"),
    [
        (False, "make up needs Docker with its compose plugin: install both, or use make serve"),
        (True, "Docker does not answer: start it (systemctl start docker), or let this user use it"),
    ],
)
def test_without_docker_or_its_answer_it_says_what_to_do(host: GpuHost, is_there: bool, said: str) -> None:
    if is_there:
        host.has_docker(daemon=1)
    done = host.make("up")
    assert done.returncode != 0
    assert done.stdout.startswith(said)
    assert is_there or not (host.folder / ".env").exists()


def test_without_an_nvidia_driver_it_starts_the_rest_and_says_so(host: GpuHost) -> None:
    host.has_docker()
    done = host.make("up")
    assert done.returncode == 0, done.stdout
    assert (
        "No worker for a GPU: no NVIDIA GPU or MIG slice found; the worker for the CPU starts." in done.stdout
    )
    assert "OptiGPU listens on http://127.0.0.1:8000" in done.stdout
    assert UP in host.docker_calls()
    assert services(host) == []


def test_secrets_are_made_once_and_are_the_owner_s_alone(host: GpuHost) -> None:
    host.has_docker()
    host.make("up")
    env = host.folder / ".env"
    written = env.read_text()
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    assert "\nPOSTGRES_PASSWORD=\n" not in written
    assert "\nOPTIGPU_API_KEY=\n" not in written
    host.make("up")
    assert env.read_text() == written


def test_each_gpu_gets_a_worker_and_is_named(host: GpuHost) -> None:
    host.has_docker()
    host.has_gpus(LISTED["mixed"])
    done = host.make("up")
    assert "worker-gpu-2: Tesla T4 (GPU-1e57ffff" in done.stdout
    assert services(host) == ["worker-gpu-0", "worker-gpu-1", "worker-gpu-2"]
    assert UP in host.docker_calls()


def test_slices_get_workers_and_a_gpu_with_mig_alone_gets_none(host: GpuHost) -> None:
    host.has_docker()
    modes = "GPU-aaaa1111-2222-3333-4444-555566667777, Enabled\nGPU-bbbb1111-2222-3333-4444-555566667777, Enabled\n"
    host.has_gpus(LISTED["slices"], divided=modes)
    assert host.make("up").returncode == 0
    assert "worker-gpu-0-mig-1" in services(host)
    assert "worker-gpu-1" not in services(host)


def test_one_gpu_is_chosen_and_another_choice_replaces_it(host: GpuHost) -> None:
    host.has_docker()
    host.has_gpus(LISTED["mixed"])
    host.make("up", "GPU=GPU-9d02")
    assert services(host) == ["worker-gpu-0"]
    host.make("up", "GPU=none")
    assert services(host) == []


def test_a_gpu_that_is_not_there_starts_nothing(host: GpuHost) -> None:
    host.has_docker()
    host.has_gpus(LISTED["one"])
    done = host.make("up", "GPU=GPU-beef")
    assert done.returncode != 0
    assert "GPU=GPU-beef: no GPU begins with this UUID. This host has: GPU-5f1c8a52" in done.stdout
    assert not any(" up " in call for call in host.docker_calls())


def test_a_driver_that_fails_starts_nothing_and_is_quoted(host: GpuHost) -> None:
    host.has_docker()
    host.has_gpus(UNREACHABLE, status=9)
    done = host.make("up")
    assert done.returncode != 0
    assert "nvidia-smi failed: NVIDIA-SMI has failed because it couldn't communicate" in done.stdout
    assert "Traceback" not in done.stdout
    assert not any(" up " in call for call in host.docker_calls())
    assert host.make("up", "GPU=none").returncode == 0


def test_a_driver_that_is_too_old_for_the_image_starts_nothing(host: GpuHost) -> None:
    host.has_docker()
    host.has_gpus(LISTED["one"], driver="535.183.01")
    done = host.make("up")
    assert done.returncode != 0
    assert "The NVIDIA driver is 535.183.01, and the image's CUDA 13.0 needs 580 or newer" in done.stdout
    assert not any(" up " in call for call in host.docker_calls())
    assert host.make("up", "GPU=none").returncode == 0


def test_workers_alone_need_addresses_and_are_started_from_their_own_file(host: GpuHost) -> None:
    host.has_docker()
    host.has_gpus(LISTED["one"])
    done = host.make("workers")
    assert done.returncode != 0
    assert done.stdout.startswith("make workers reads .env: cp .env.worker.example .env")
    (host.folder / ".env").write_text((host.folder / ".env.worker.example").read_text())
    assert host.make("workers").returncode == 0
    assert UP.replace("docker-compose.yml", "docker-compose.worker.yml") in host.docker_calls()


def test_down_ends_what_was_started_whatever_the_files_say_now(host: GpuHost) -> None:
    host.has_docker()
    assert host.make("down").returncode == 0
    assert host.docker_calls() == ["docker compose --project-name optigpu down --remove-orphans"]
