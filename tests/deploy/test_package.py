"""What `pip install optigpu` brings, whole and under each name; what the image checks, which tests/docker builds. And
`make up`, `make workers` and `make down` on hosts with and without Docker and GPUs; both are stand-ins."""

import json
import os
import stat
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.compose import ROOT, read_compose
from tests.deploy.gpu_host import LISTED, UNREACHABLE, GpuHost
from tests.engine.test_cli_run import MEASURED, QUICK
from tests.wheels import built, installed
from tools.image_check import problems, torch_cuda

DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> set[str]:
    """The names of the files in the wheel."""
    with zipfile.ZipFile(wheel_file) as archive:
        return set(archive.namelist())


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_optigpu(wheel: set[str]) -> None:
    files = [path.relative_to(ROOT) for path in (ROOT / "optigpu").rglob("*") if path.is_file()]
    files += [path.relative_to(ROOT / "names") for path in (ROOT / "names").rglob("*.py")]
    expected = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    assert expected - wheel == set()


@pytest.mark.slow
def test_the_wheel_holds_nothing_else(wheel: set[str]) -> None:
    names = {path.name for path in (ROOT / "names").iterdir() if path.is_dir()}
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"optigpu", *names}


@pytest.mark.long
def test_the_installed_wheel_measures_outside_of_the_checkout(wheel_file: Path, tmp_path: Path) -> None:
    """A bundled model through a ladder, whose files and tables are those of the wheel."""
    folder = installed(wheel_file, tmp_path / "installed")
    variables = os.environ | {"PYTHONPATH": str(folder), "OPTIGPU_DATA_DIR": str(tmp_path / "data")}

    def optigpu(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "bin" / "optigpu"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert optigpu("--version").stdout.split()[-1] == project["version"]
    shape = ("--prompt-tokens", "8", "--new-tokens", "4")
    ladder = ("ladder", "--model", "bundled:tiny", "--stack", "native_decode")
    ran = optigpu(*ladder, *shape, *QUICK, "--format", "json")
    assert ran.returncode in MEASURED, ran.stderr
    results = json.loads(ran.stdout)["results"]
    assert [result["variant"]["label"] for result in results] == ["baseline", "native_decode"]
    assert {result["provenance"]["git_revision"] for result in results} == {None}, "it is no checkout"


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # The extra dev names others of this package.
    chosen = (project["dependencies"], *(extras[name] for name in ("service", "dev", "docs", "frames")))
    installed = {canonicalize_name(Requirement(line).name) for lines in chosen for line in lines}
    assert installed - pinned == {project["name"]}


def test_the_image_runs_the_api_as_the_compose_file_does() -> None:
    services = read_compose({"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"})["services"]
    command = ", ".join(f'"{word}"' for word in services["api"]["command"])
    assert DOCKERFILE.endswith(f"CMD [{command}]\n")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """What a check looks at in a good image: packages, headers, programs."""
    files = {
        "packages/torch/version.py": "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n",
        "packages/bitsandbytes/libbitsandbytes_cuda130.so": "",
        "packages/triton/backends/nvidia/bin/ptxas": "",
        "include/Python.h": "",
        "bin/g++": "",
        "bin/gcc": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def said(image: Path) -> list[str]:
    return problems("13.0", image / "packages", image / "include", str(image / "bin"))


def test_a_good_image_has_no_problem(image: Path) -> None:
    assert said(image) == []
    assert torch_cuda(image / "packages") == "13.0"


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ("packages/torch/version.py", "torch is built without CUDA and not with CUDA 13.0"),
        ("packages/bitsandbytes/libbitsandbytes_cuda130.so", "bitsandbytes has no library for CUDA 13.0"),
        ("packages/triton/backends/nvidia/bin/ptxas", "Triton has no assembler"),
        ("include/Python.h", "Python's headers are not in"),
        ("bin/g++", "There is no g++ on PATH"),
    ],
)
def test_what_is_missing_in_an_image_is_a_sentence(image: Path, lost: str, sentence: str) -> None:
    (image / lost).unlink()
    (problem,) = said(image)
    assert problem.startswith(sentence)


def test_a_wheel_of_another_cuda_is_named(image: Path) -> None:
    version = image / "packages" / "torch" / "version.py"
    version.write_text(version.read_text().replace("'13.0'", "'12.6'"))
    (problem,) = said(image)
    assert problem.startswith("torch is built with CUDA 12.6 and not with CUDA 13.0")


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
