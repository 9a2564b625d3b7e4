"""The machine with Docker: the image is built by the Makefile, and the services are as a user sees them."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.docker.host import Host, has_cpu_wheel, started

ADDRESS = "http://127.0.0.1:8000"
TIMEOUT_S = 1800
JOB = {
    "workload": {"kind": "generate", "batch_size": 1, "prompt_tokens": 16, "new_tokens": 16},
    "model": "bundled:tiny",
    "device": "cpu",
    "measure": {
        "replicates": 1,
        "min_seconds": 0.1,
        "max_seconds": 1,
        "rel_ci": 1,
        "meters": ["latency", "quality"],
    },
    "limits": {"wait_for_quiet_s": 0},
}
ENDED = ("succeeded", "failed", "cancelled")


class Deployed:
    """The services. `said` is what `make up` printed."""

    def __init__(self, host: Host, said: str) -> None:
        self.host, self.said = host, said
        lines = (host.folder / ".env").read_text().splitlines()
        self.settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        headers = {"Authorization": f"Bearer {self.settings['OPTIGPU_API_KEY']}"}
        self.client = httpx.Client(base_url=ADDRESS, headers=headers, timeout=60, trust_env=False)

    def get(self, path: str) -> Any:
        response = self.client.get(path)
        assert response.is_success, response.text
        return response.json()

    def measured(self, spec: dict[str, Any]) -> str:
        """The id of a job after it has succeeded."""
        posted = self.client.post("/v1/jobs", json=spec)
        assert posted.status_code == 202, posted.text
        job = str(posted.json()["id"])
        self.wait_until("the job has ended", lambda: self.get(f"/v1/jobs/{job}")["state"] in ENDED)
        found = self.get(f"/v1/jobs/{job}")
        assert found["state"] == "succeeded", f"{json.dumps(found, indent=1)}\n{self.logs()}"
        return job

    def ranked(self) -> set[str]:
        """The jobs whose results are on the leaderboard, those that a busy machine made invalid included."""
        boards = self.get("/v1/leaderboard?include_invalid=true")["boards"]
        return {row["job_id"] for board in boards for row in board["rows"]}

    def health(self) -> dict[str, str]:
        """The health of each service's container, as `docker compose ps` says it."""
        listed = self.host.run("docker", "compose", "ps", "--format", "json").stdout.splitlines()
        return {each["Service"]: each["Health"] for each in map(json.loads, listed)}

    def inside(self, service: str, script: str) -> str:
        """What a script prints in the container of a service."""
        return self.host.run("docker", "compose", "exec", "-T", service, "sh", "-c", script).stdout.strip()

    def wait_until_healthy(self) -> None:
        self.wait_until("every service is healthy", lambda: set(self.health().values()) == {"healthy"})

    def wait_until(self, what: str, happens: Callable[[], bool]) -> None:
        """Fails with what the services wrote when it does not happen."""
        deadline = time.monotonic() + TIMEOUT_S
        while not happens():
            assert time.monotonic() < deadline, f"{what}: not within {TIMEOUT_S} s.\n{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        return self.host.run("docker", "compose", "logs", "--no-color", check=False).stdout


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
