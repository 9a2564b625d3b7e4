"""The services of docker-compose.yml as plain processes: their own commands, their own environments."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import URL

from tests.deploy.compose import ROOT, read_compose
from tests.servers.process import free_port

DOCKER_GRACE_S = 10  # how long Docker waits after SIGTERM where stop_grace_period does not say


class Deployment:
    """The services as `docker compose up` would start them, on this machine and these servers.

    `database` is what the postgres service would have made of its environment: a database and a role.
    """

    def __init__(self, database: URL, redis_url: str, folder: Path, api_key: str) -> None:
        port = str(free_port())
        self._folder = folder
        self._services = read_compose(
            {
                "POSTGRES_USER": str(database.username),
                "POSTGRES_PASSWORD": str(database.password),
                "POSTGRES_DB": str(database.database),
                "OPTIGPU_API_KEY": api_key,
            }
        )["services"]
        self._words = {"8000": port, "python": sys.executable, "alembic": _beside_python("alembic")}
        self._addresses = {
            "@postgres:5432/": f"@{database.host}:{database.port}/",
            "redis://redis:6379/0": redis_url,
            "/var/lib/optigpu": str(folder),
            "/tmp/optigpu-heartbeat": str(folder / "heartbeat"),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        headers = {"Authorization": f"Bearer {api_key}"}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=10)

    def start(self, name: str) -> None:
        definition = self._services[name]
        with self._log(name).open("wb") as sink:
            self._processes[name] = subprocess.Popen(
                [self._words.get(word, word) for word in definition["command"]],
                cwd=ROOT,
                env=self._environment(definition["environment"]),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def status(self, name: str, timeout_s: float) -> int:
        """The exit status of a service that ends by itself."""
        return self._processes[name].wait(timeout_s)

    def stop(self, name: str) -> int:
        """The exit status after SIGTERM, within the time that Docker would give."""
        grace = self._services[name].get("stop_grace_period", f"{DOCKER_GRACE_S}s")
        self._processes[name].send_signal(signal.SIGTERM)
        return self._processes[name].wait(float(grace.removesuffix("s")))

    def family(self) -> list[psutil.Process]:
        """Every process of every service that is alive, with its descendants."""
        alive = [process.pid for process in self._processes.values() if process.poll() is None]
        services = [psutil.Process(pid) for pid in alive]
        return services + [child for process in services for child in process.children(recursive=True)]

    def wait_until(self, what: str, happens: Callable[[httpx.Client], bool], timeout_s: float) -> None:
        """Fails with what the services wrote when it does not happen in time, or when a service fails first."""
        deadline = time.monotonic() + timeout_s
        while not happens(self.client):
            failed = [name for name, process in self._processes.items() if process.poll() not in (None, 0)]
            assert not failed, f"{what}: not with {', '.join(failed)} gone.\n{self.logs()}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s.\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self._log(name).read_text()}" for name in self._processes)

    def kill(self) -> None:
        """Leaves nothing behind, whatever happened."""
        for process in self.family():
            process.kill()
        for service in self._processes.values():
            service.wait()
        self.client.close()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        """As in a container: what the service sets, and of ours only where programs and a home are."""
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        for name, value in settings.items():
            for theirs, ours in self._addresses.items():
                value = value.replace(theirs, ours)
            environment[name] = value
        return environment


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False


def read(client: httpx.Client, path: str) -> Any:
    response = client.get(path)
    assert response.is_success, response.text
    return response.json()


def _beside_python(program: str) -> str:
    return str(Path(sys.executable).with_name(program))
