"""docker-compose.monitoring.yml: Prometheus reads the API by a key, and evaluates every alert.

Grafana is not run here: Debian has no package of it.
"""

from typing import Any

import httpx
import pytest

from tests.docker.deployed import Deployed

pytestmark = [pytest.mark.docker, pytest.mark.slow]

CREATE = "docker compose exec -T api python -m api keys create prometheus --scope read 2>/dev/null"
COMPOSE = "docker compose --file docker-compose.monitoring.yml"


def asked(path: str) -> Any:
    return httpx.get(f"http://127.0.0.1:9090/api/v1/{path}", trust_env=False).json()["data"]


def test_prometheus_scrapes_the_api_and_evaluates_the_alerts(deployed: Deployed) -> None:
    key = deployed.host.shell(CREATE).strip()
    with (deployed.host.folder / ".env").open("a") as env:
        env.write(f"PROMETHEUS_KEY={key}\nGRAFANA_PASSWORD=secret\n")
    deployed.host.shell(f"{COMPOSE} up --detach prometheus")
    try:
        deployed.wait_until(
            "Prometheus has read /metrics", lambda: [t["health"] for t in targets()] == ["up"]
        )
        deployed.wait_until("it has evaluated the alerts", lambda: {r["health"] for r in rules()} == {"ok"})
        assert len(rules()) >= 9
    finally:
        deployed.host.shell(f"{COMPOSE} down --volumes")


def targets() -> list[dict[str, Any]]:
    try:
        return list(asked("targets")["activeTargets"])
    except httpx.TransportError:
        return []


def rules() -> list[dict[str, Any]]:
    return [rule for group in asked("rules")["groups"] for rule in group["rules"]]
