"""The order in which a test server is looked for, and the last sentence, on made-up machines."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.servers.machine import Machine
from tests.servers.process import NoServerError, Server
from tests.servers.rule import Kind, is_possible, provide

LOCAL_URL = "thing://127.0.0.1:4242"
DOCKER_URL = "thing://127.0.0.1:49153"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """No variable set, no program installed, nothing that may be installed."""
    (tmp_path / "bin").mkdir()
    return Machine(
        environment={},
        search_path=str(tmp_path / "bin"),
        postgres_root=tmp_path / "postgresql",
        families=frozenset(),
        is_root=False,
    )


def kind(*answering: str) -> Kind:
    """A server whose program is `thingd`, of which those at the `answering` addresses run already."""

    def start(machine: Machine) -> Server | None:
        return Server("thing://own", origin="programs") if machine.program("thingd") else None

    return Kind(
        name="Thing",
        variable="THING_URL",
        standard_port=4242,
        package="thing-server",
        image="thing:1",
        image_environment=("TRUST=yes",),
        candidates=lambda _, port: [f"thing://127.0.0.1:{port}"],
        answers=lambda url: url in answering,
        programs=("thingd",),
        start=start,
    )


@pytest.fixture
def install(machine: Machine) -> Callable[[str, str], None]:
    """Puts a shell script of this name and content on the machine's search path."""

    def write(name: str, script: str) -> None:
        program = Path(machine.search_path) / name
        program.write_text(f"#!/bin/sh\nhere={machine.search_path}\n{script}\n")
        program.chmod(0o755)

    return write


Install = Callable[[str, str], None]


def test_the_variable_comes_first(machine: Machine, install: Install) -> None:
    install("thingd", "")
    server = provide(
        kind("thing://mine", LOCAL_URL), replace(machine, environment={"THING_URL": "thing://mine"})
    )
    assert (server.url, server.origin) == ("thing://mine", "variable")


def test_a_variable_that_names_no_server_is_an_error_and_not_passed_over(machine: Machine) -> None:
    with pytest.raises(NoServerError, match=r"^THING_URL is set, but no usable Thing answers"):
        provide(kind(LOCAL_URL), replace(machine, environment={"THING_URL": "thing://gone"}))


def test_an_empty_variable_counts_as_unset(machine: Machine) -> None:
    assert provide(kind(LOCAL_URL), replace(machine, environment={"THING_URL": ""})).origin == "localhost"


def test_then_what_answers_on_localhost(machine: Machine, install: Install) -> None:
    install("thingd", "")
    server = provide(kind(LOCAL_URL), machine)
    assert (server.url, server.origin) == (LOCAL_URL, "localhost")


def test_then_the_programs_of_the_machine(machine: Machine, install: Install) -> None:
    install("thingd", "")
    install("apt-get", "touch $here/used")
    server = provide(kind(), replace(machine, families=frozenset({"debian"}), is_root=True))
    assert server.origin == "programs"
    assert not (Path(machine.search_path) / "used").exists()


@pytest.fixture
def apt_get(install: Install) -> None:
    """An apt-get that notes how it was called and whose install brings the program."""
    install(
        "apt-get",
        'echo "$DEBIAN_FRONTEND" "$@" >> $here/calls\ncase "$*" in *thing-server) cp $0 $here/thingd;; esac',
    )


@pytest.mark.usefixtures("apt_get")
@pytest.mark.parametrize("families", [{"debian"}, {"ubuntu", "debian"}])
def test_then_apt_get_installs_them(machine: Machine, families: set[str]) -> None:
    server = provide(kind(), replace(machine, families=frozenset(families), is_root=True))
    assert server.origin == "programs"
    update, install = (Path(machine.search_path) / "calls").read_text().splitlines()
    assert update.startswith("noninteractive ")
    assert update.endswith(" update")
    assert install.endswith(" install --yes --no-install-recommends thing-server")


@pytest.mark.usefixtures("apt_get")
@pytest.mark.parametrize(("family", "is_root"), [("debian", False), ("fedora", True)])
def test_apt_get_is_for_root_on_debian(machine: Machine, family: str, is_root: bool) -> None:
    with pytest.raises(NoServerError):
        provide(kind(), replace(machine, families=frozenset({family}), is_root=is_root))
    assert not (Path(machine.search_path) / "calls").exists()


@pytest.fixture
def docker(install: Install) -> None:
    """A docker that notes how it was called and answers as the real one does."""
    install(
        "docker",
        'echo "$@" >> $here/calls\ncase "$1" in run) echo 0af3;; port) echo 127.0.0.1:49153;; esac',
    )


@pytest.mark.usefixtures("docker")
def test_then_docker(machine: Machine, install: Install) -> None:
    install("apt-get", "exit 100")  # no network, say
    server = provide(kind(DOCKER_URL), replace(machine, families=frozenset({"debian"}), is_root=True))
    assert (server.url, server.origin) == (DOCKER_URL, "docker")
    server.stop()
    calls = (Path(machine.search_path) / "calls").read_text().splitlines()
    assert calls == [
        "info",
        "run --rm --detach --publish 127.0.0.1::4242 --env TRUST=yes thing:1",
        "port 0af3 4242",
        "rm --force 0af3",
    ]


def test_a_docker_without_its_daemon_is_passed_over(machine: Machine, install: Install) -> None:
    install("docker", "exit 1")
    with pytest.raises(NoServerError):
        provide(kind(), machine)


def test_a_container_that_cannot_start_says_why(machine: Machine, install: Install) -> None:
    install("docker", 'case "$1" in run) echo "no such image" >&2; exit 125;; esac')
    with pytest.raises(NoServerError, match="no such image"):
        provide(kind(), machine)


def test_at_last_one_sentence_says_what_to_install(machine: Machine) -> None:
    with pytest.raises(NoServerError) as caught:
        provide(kind(), machine)
    assert str(caught.value) == (
        "These tests need Thing: install it (Debian and Ubuntu: apt-get install thing-server; "
        "macOS: brew install thing), start Docker, or set THING_URL."
    )


def test_a_program_is_found_on_the_path_or_where_debian_keeps_postgresql(machine: Machine) -> None:
    for version in ("9.6", "15", "16"):
        program = machine.postgres_root / version / "bin" / "initdb"
        program.parent.mkdir(parents=True)
        program.touch(0o755)
    assert machine.program("initdb") == str(machine.postgres_root / "16" / "bin" / "initdb")
    assert machine.program("absent") is None


def test_without_any_way_to_a_server_none_is_possible(machine: Machine, install: Install) -> None:
    """Being root helps only where something can be installed."""
    assert not is_possible(kind(), replace(machine, is_root=True))
    assert is_possible(kind(LOCAL_URL), machine)
    assert is_possible(kind(), replace(machine, environment={"THING_URL": "thing://gone"}))
    install("thingd", "")
    assert is_possible(kind(), machine)


@pytest.mark.parametrize("program", ["apt-get", "docker"])
def test_what_can_install_or_run_one_is_a_way(machine: Machine, install: Install, program: str) -> None:
    install(program, "")
    assert is_possible(kind(), replace(machine, is_root=True, families=frozenset({"debian"})))
