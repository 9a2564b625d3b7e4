"""Where the tests' PostgreSQL, Redis and Slurm come from.

In this order: the server that a variable names; one that answers on localhost's standard port; a
throw-away one from the machine's own programs; the same after apt-get has installed them (root on
Debian and Ubuntu); Docker. Slurm is always a throw-away one. Where there is not even one of these,
the tests that need the server are left out, and the end of the run says so; where one is there and
does not work, they fail with one sentence.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from filelock import FileLock

from tests.servers.process import Machine, NoServerError, Server, wait_until_it_answers

INSTALL_TIMEOUT_S = 120
PULL_TIMEOUT_S = 120
PROGRAMS: Mapping[str, str] = MappingProxyType({"nginx": "nginx", "caddy": "caddy", "promtool": "prometheus"})
"""Programs that tests run as they are, each with its Debian package; a fixture of that name gives its path."""


@dataclass(frozen=True)
class Kind:
    """One kind of server: how to recognise it, how to start it, how to install it."""

    name: str
    variable: str
    standard_port: int
    package: str
    # Empty where there is no container of it.
    image: str
    image_environment: tuple[str, ...]
    # URLs worth trying on this port of 127.0.0.1, the likeliest first.
    candidates: Callable[[Machine, int], list[str]]
    answers: Callable[[str], bool]
    # All that `start` needs.
    programs: tuple[str, ...]
    # Starts a throw-away server; None when its programs are not on the machine.
    start: Callable[[Machine], Server | None]


def provide(kind: Kind, machine: Machine) -> Server:
    """A running server. Raises NoServerError when there is no way to one."""
    for way in (_from_variable, _from_localhost, _from_programs, _from_apt, _from_docker):
        server = way(kind, machine)
        if server is not None:
            return server
    raise NoServerError(f"These tests need {kind.name}: {advice(kind)}")


def is_possible(kind: Kind, machine: Machine) -> bool:
    """Whether there is a way to a server, tried or not. Nothing is started or installed to know."""
    return (
        bool(machine.environment.get(kind.variable))
        or all(machine.program(name) for name in kind.programs)
        or _may_install(machine)
        or bool(kind.image and machine.program("docker"))
        or _from_localhost(kind, machine) is not None
    )


def advice(kind: Kind) -> str:
    """What helps where there is no server."""
    if not kind.image:
        return f"install it (Debian and Ubuntu: apt-get install {kind.package})."
    return (
        f"install it (Debian and Ubuntu: apt-get install {kind.package}; macOS: brew install "
        f"{kind.package.removesuffix('-server')}), start Docker, or set {kind.variable}."
    )


def _from_variable(kind: Kind, machine: Machine) -> Server | None:
    url = machine.environment.get(kind.variable)
    if not url:
        return None
    if not kind.answers(url):
        raise NoServerError(
            f"{kind.variable} is set, but no usable {kind.name} answers at its address: "
            "correct it, or unset it to have a server found or started."
        )
    return Server(url, origin="variable")


def _from_localhost(kind: Kind, machine: Machine) -> Server | None:
    for url in kind.candidates(machine, kind.standard_port):
        if kind.answers(url):
            return Server(url, origin="localhost")
    return None


def _from_programs(kind: Kind, machine: Machine) -> Server | None:
    return kind.start(machine)


def _from_apt(kind: Kind, machine: Machine) -> Server | None:
    return kind.start(machine) if apt_installs(kind.package, machine) else None


def program(name: str, package: str, machine: Machine) -> str:
    """The path of a program, which apt-get installs where it may. Raises NoServerError where there is no way to it."""
    found = machine.program(name) or (apt_installs(package, machine) and machine.program(name))
    if not found:
        raise NoServerError(
            f"These tests need {name}: install it (Debian and Ubuntu: apt-get install {package})."
        )
    return found


def may_have(name: str, machine: Machine) -> bool:
    """Whether there is a way to a program, tried or not."""
    return machine.program(name) is not None or _may_install(machine)


def apt_installs(package: str, machine: Machine) -> bool:
    """Whether apt-get has installed the package; False where that is not possible."""
    apt_get = machine.program("apt-get")
    if apt_get is None or not _may_install(machine):
        return False
    print(f"Installing {package} with apt-get for the tests ...", file=sys.stderr)
    environment = {**machine.environment, "DEBIAN_FRONTEND": "noninteractive"}
    # Another process of the tests may install something at the same time, and `apt-get update` waits for nobody.
    with FileLock(Path(tempfile.gettempdir()) / "optigpu-tests-apt-get.lock"):
        return all(
            _succeeds([apt_get, "-q", "-o", "DPkg::Lock::Timeout=60", *arguments], environment)
            for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *package.split()])
        )


def _may_install(machine: Machine) -> bool:
    return machine.program("apt-get") is not None and machine.is_root and "debian" in machine.families


def _succeeds(command: list[str], environment: dict[str, str]) -> bool:
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _from_docker(kind: Kind, machine: Machine) -> Server | None:
    docker = machine.program("docker") if kind.image else None
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode != 0:
        return None
    settings = [argument for pair in kind.image_environment for argument in ("--env", pair)]
    publish = ["--publish", f"127.0.0.1::{kind.standard_port}"]
    container = _output([docker, "run", "--rm", "--detach", *publish, *settings, kind.image])

    def remove() -> None:
        subprocess.run([docker, "rm", "--force", container], capture_output=True, check=True)

    try:
        address = _output([docker, "port", container, str(kind.standard_port)]).splitlines()[0]
        url = kind.candidates(machine, int(address.rpartition(":")[2]))[0]
        wait_until_it_answers(lambda: kind.answers(url), what=f"the {kind.image} container")
    except BaseException:
        remove()
        raise
    return Server(url, origin="docker", stop=remove)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PULL_TIMEOUT_S)
    if done.returncode != 0:
        raise NoServerError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()
