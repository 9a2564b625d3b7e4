"""A machine with Docker: Debian in a folder, entered by chroot; `tests/docker/__main__.py` makes its namespaces.

Docker, its command and Compose are Debian's own, as a user has them. The images that the Dockerfile and the compose
files name are made here from Debian's packages, under their names, so that nothing comes from a registry of images.
"""

import hashlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from optigpu.paths import cache_dir
from tests.deploy.compose import ROOT
from tests.servers.process import wait_until_it_answers

INSIDE = "TESTS_IN_NAMESPACES"
"""Set where the tests run in namespaces of their own."""
HOST = ("trixie", "docker.io,docker-cli,docker-compose,iptables,git,make,ca-certificates,curl,python3")
"""The first release of Debian with Compose 2, which is what `docker compose` calls."""
PYTHON = ("bookworm", "python3,python3-venv,python3-dev,python-is-python3,ca-certificates")
SERVERS = ("trixie", "postgresql,redis-server,prometheus,openssl")
BASE = "python:3.11-slim-bookworm"
SERVER_IMAGES = ("postgres:17", "redis:7-alpine", "prom/prometheus:v3.5.0")
WHEELS, CERTIFICATES = "/wheels", "/etc/ssl/certs/ca-certificates.crt"
UNPRIVILEGED_ULIMITS = "  ulimits:\n    nice: 40\n"
"""What compose files ask for and what a machine without CAP_SYS_RESOURCE cannot give."""


def cache_folder() -> Path:
    """Where Debian, the images and Docker's layers are kept: some GB."""
    return cache_dir() / "tests-docker"


Setup = Callable[[Path], list[str]]
"""What else is put into a Debian: mmdebstrap's hooks, which may use files of a temporary folder."""


@dataclass(frozen=True)
class Host:
    """The machine: its root folder, and the checkout in it."""

    root: Path
    checkout: str = "/srv/optigpu"

    @property
    def folder(self) -> Path:
        """The checkout, seen from outside."""
        return self.root / self.checkout.removeprefix("/")

    def run(
        self, *command: str, check: bool = True, stdin: IO[bytes] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command in the checkout; its outputs come back together. With `check` a failure is an error."""
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        done = subprocess.run(
            ["chroot", str(self.root), "sh", "-c", f'cd {self.checkout} && exec "$@"', "sh", *command],
            env=environment,
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        printed = done.stdout.decode(errors="replace")
        assert not check or done.returncode == 0, f"{' '.join(command)}\n{printed}"
        return subprocess.CompletedProcess(done.args, done.returncode, printed, "")

    def shell(self, script: str) -> str:
        """What a script prints in bash, which ends at the first failure."""
        return self.run("bash", "-eu", "-o", "pipefail", "-c", script).stdout


@contextmanager
def started() -> Iterator[Host]:
    """The machine with a fresh clone, Docker running, the images that ours are made of, and no container or volume."""
    root = _debian(*HOST)
    with _mounted(root), _dockerd(root):
        host = Host(root)
        _clone(host)
        _import_images(host)
        host.shell("docker ps --all --quiet | xargs --no-run-if-empty docker rm --force --volumes >/dev/null")
        host.shell("docker volume ls --quiet | xargs --no-run-if-empty docker volume rm >/dev/null")
        yield host
        host.shell(
            "docker image prune --force >/dev/null; docker builder prune --force --keep-storage 8GB >/dev/null"
        )


def has_cpu_wheel(host: Host) -> bool:
    """Whether the image can be built with torch's smaller wheel."""
    return "torch" in host.run("docker", "run", "--rm", BASE, "ls", WHEELS).stdout


def _debian(suite: str, packages: str, *, archive: bool = False, setup: Setup | None = None) -> Path:
    """A folder, or an archive, with Debian, these packages and what the hooks of `setup` bring.

    It is made once for each list of packages.
    """
    name = hashlib.sha256(f"{suite} {packages}".encode()).hexdigest()[:12]
    target = cache_folder() / f"{suite}-{name}{'.tar' if archive else ''}"
    if target.exists():
        return target
    print(f"Making Debian {suite} with {packages} for the tests ...", file=sys.stderr)
    partial = target.with_name(f"partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        hooks = [f"--customize-hook={each}" for each in (setup(Path(folder)) if setup else ())]
        command = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={packages}", *hooks]
        subprocess.run([*command, suite, str(partial)], check=True)
    partial.rename(target)
    return target


@contextmanager
def _mounted(root: Path) -> Iterator[None]:
    """The kernel's file systems in the folder, which is a mount point itself so that runc may leave it."""
    for arguments in (
        ("--bind", str(root), str(root)),
        ("-t", "proc", "proc", str(root / "proc")),
        ("-t", "sysfs", "sysfs", str(root / "sys")),
        ("--rbind", "/sys/fs/cgroup", str(root / "sys/fs/cgroup")),
        ("--rbind", "/dev", str(root / "dev")),
        ("-t", "tmpfs", "tmpfs", str(root / "run")),
        ("-t", "tmpfs", "tmpfs", str(root / "tmp")),
    ):
        subprocess.run(["mount", *arguments], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    yield


@contextmanager
def _dockerd(root: Path) -> Iterator[None]:
    """Docker's daemon, with the limits of files that this machine allows.

    The folder becomes the root of its mounts: a program that joins those of a container begins at their root.
    """
    (root / "old").mkdir(exist_ok=True)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = f"exec dockerd --default-ulimit nofile=1024:{min(files, 4096)}"
    script = f"cd {root} && pivot_root . old && {command}"
    host = Host(root, "/")
    with (root / "var/log/dockerd").open("wb") as log:
        daemon = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdout=log, stderr=log)
        try:
            wait_until_it_answers(
                lambda: host.run("docker", "info", check=False).returncode == 0, what="Docker"
            )
            yield
        finally:
            daemon.terminate()
            daemon.wait()


def _clone(host: Host) -> None:
    """A fresh clone of the checkout, with what is not committed yet."""
    shutil.rmtree(host.folder, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(host.folder)], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = host.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)
        else:
            target.unlink(missing_ok=True)
    if subprocess.run(
        ["prlimit", "--nice=40:40", "true"], capture_output=True
    ).returncode:  # not allowed here
        for name in ("docker-compose.yml", "docker-compose.worker.yml"):
            text = (host.folder / name).read_text()
            assert UNPRIVILEGED_ULIMITS in text
            (host.folder / name).write_text(text.replace(UNPRIVILEGED_ULIMITS, ""))


def _import_images(host: Host) -> None:
    _import(host, _debian(*PYTHON, archive=True, setup=_pip_settings), BASE)
    _import(host, _debian(*SERVERS, archive=True), "optigpu-tests/servers")
    tags = [option for name in SERVER_IMAGES for option in ("--tag", name)]
    host.run("docker", "build", "--quiet", *tags, "--file", "tests/docker/servers.Dockerfile", "tests/docker")


def _pip_settings(folder: Path) -> list[str]:
    """What this machine's pip knows of certificates, and torch's wheel for CPUs where it finds one without an index."""
    lines = ["[global]", f"find-links = {WHEELS}"]
    (version,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    (folder / "wheels").mkdir()
    subprocess.run(
        [*download, "--dest", str(folder / "wheels"), f"torch=={version}+cpu"], capture_output=True
    )
    hooks = [f"copy-in {folder}/wheels /"]
    certificates = _pip_says("global.cert") or _pip_says(":env:.cert")
    if certificates:
        lines.append(f"cert = {CERTIFICATES}")
        hooks.append(f"upload {certificates} {CERTIFICATES}")
    (folder / "pip.conf").write_text("\n".join(lines))
    return [*hooks, f"upload {folder}/pip.conf /etc/pip.conf"]


def _pip_says(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", name], capture_output=True, text=True
    )
    return done.stdout.strip()


def _import(host: Host, archive: Path, name: str) -> None:
    """Makes an image of an archive, unless Docker has it from a run before."""
    label = host.run(
        "docker", "image", "inspect", "--format", "{{.Config.Labels.archive}}", name, check=False
    )
    if label.stdout.strip() != archive.name:
        with archive.open("rb") as data:
            host.run("docker", "import", "--change", f"LABEL archive={archive.name}", "-", name, stdin=data)
