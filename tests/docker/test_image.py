"""The image as it was built: what is in it, and what the build says where it cannot end."""

import tomllib

import pytest

from tests.deploy.compose import ROOT
from tests.docker.deployed import Deployed
from tests.docker.host import Host

pytestmark = pytest.mark.docker

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_command_is_there_and_says_its_version(host: Host, deployed: Deployed) -> None:
    assert VERSION in host.shell("docker run --rm optigpu optigpu --version")
    assert "usage" in host.shell("docker run --rm optigpu hf download --help").lower()


def test_another_version_than_the_project_s_ends_a_build(host: Host, deployed: Deployed) -> None:
    """The check of the Dockerfile, with a project that has a later version than the image."""
    (host.folder / "later.toml").write_text('[project]\nversion = "99.9"\n')
    mounts = [
        f"{host.checkout}/tools/image_check.py:/tmp/image_check.py:ro",
        f"{host.checkout}/later.toml:/tmp/later.toml:ro",
    ]
    volumes = [option for mount in mounts for option in ("--volume", mount)]
    check = [
        "python",
        "/tmp/image_check.py",
        "--torch",
        deployed.settings["TORCH"],
        "--cuda",
        "13.0",
        "--project",
        "/tmp/later.toml",
    ]
    done = host.run("docker", "run", "--rm", *volumes, "optigpu", *check, check=False)
    (host.folder / "later.toml").unlink()
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"`optigpu --version` does not say '99.9' but 'optigpu {VERSION}'."


NO_NETWORK = """
services:
  api: {build: {network: none, args: {TORCH_INDEX: http://index.invalid/simple}}}
"""


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
