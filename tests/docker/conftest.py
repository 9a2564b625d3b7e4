"""The machine with Docker, on which everything is up: the image is built by the Makefile, as a user would."""

from collections.abc import Iterator

import pytest

from tests.docker.deployed import Deployed
from tests.docker.host import Host, has_cpu_wheel, started


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """The machine, with the image built."""
    with started() as host:
        host.shell("make .env")
        if has_cpu_wheel(host):
            host.shell("sed --in-place s/^TORCH=.*/TORCH=cpu/ .env")
        yield host


@pytest.fixture(scope="session")
def deployed(host: Host) -> Deployed:
    """What `make up` started."""
    return Deployed(host, host.shell("make up"))
