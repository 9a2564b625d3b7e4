"""What an operator does with a service that holds measured results: keys, webhooks, alerts, backup, upgrade."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import migrations
from api.__main__ import main
from optigpu.client import Client
from tests.journeys.machine import TINY, Machine, Station, a_station
from tests.servers.process import this_machine
from tests.service.processes import eventually
from tests.service.receiver import receiving
from tests.service.test_keys import bearer

pytestmark = pytest.mark.slow
BATCHES: dict[str, Any] = {
    "workload": {"kind": "generate", "prompt_tokens": 4, "new_tokens": 2},
    "model": "bundled:tiny",
    "device": "cpu",
    "plan": "batch_scaling",
    "limits": {"max_bytes": 1_000_000_000, "max_batch": 2, "wait_for_quiet_s": 0},
}
"""Its result holds on a machine that is busy: nothing in it is timed."""


@contextmanager
def operating(url: str) -> Iterator[None]:
    """`python -m api ...` works on this database, and finds PostgreSQL's programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_DATABASE_URL", url)
        if pg_dump := this_machine().program("pg_dump"):
            patch.setenv("PATH", f"{Path(pg_dump).parent}{os.pathsep}{os.environ['PATH']}")
        yield


def seen(station: Station, result_id: str) -> Any:
    """What readers have of the database."""
    jobs = station.get("/v1/jobs")["jobs"]
    return [station.rows(), jobs, station.get(f"/v1/results/{result_id}/samples")]


def test_measured_results_live_through_an_upgrade_and_a_loss(
    machine: Machine, database_url: str, tmp_path: Path
) -> None:
    run = machine.measured("run", *TINY)
    result = run["results"][0]["id"]
    with a_station(machine, database_url) as station:
        station.optigpu("import", run["id"])
        before = seen(station, result)

    migrations.downgrade(database_url, "-1")
    assert migrations.lacking(database_url) is not None
    with a_station(machine, database_url) as upgraded:
        assert seen(upgraded, result) == before

    with operating(database_url):
        assert main(["backup", str(tmp_path / "backup")]) == 0
        migrations.downgrade(database_url, "base")
        assert main(["restore", str(tmp_path / "backup")]) == 0
    with a_station(machine, database_url) as restored:
        assert seen(restored, result) == before
        again = restored.read("replay", result, "--wait-for-quiet", "0")
        assert again["comparison"]["baseline"]["id"] == result


def test_a_key_opens_what_its_scope_says_until_it_is_revoked(
    machine: Machine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"

    def made(name: str, scope: str) -> str:
        assert main(["keys", "create", name, "--scope", scope]) == 0
        return capsys.readouterr().out.strip().splitlines()[-1]

    with a_station(machine, url) as station, operating(url):
        submitter, admin = made("ci", "submit"), made("operator", "admin")
        request = json.dumps(BATCHES)
        file = tmp_path / "job.json"
        file.write_text(request)
        asked = ("submit", file, "--url", station.url)
        assert "key" in machine.refused(*asked, status=1)
        job_id = machine.optigpu(*asked, "--api-key", submitter).strip()
        with Client(station.url, submitter) as client:
            assert client.wait(job_id).state == "succeeded"
        withdraw = ("withdraw", "--job", job_id, "--reason", "A trial.", "--url", station.url, "--api-key")
        assert "admin" in machine.refused(*withdraw, submitter, status=1)
        assert "withdrawn by operator" in machine.optigpu(*withdraw, admin)

        assert main(["keys", "list"]) == 0
        listed = capsys.readouterr().out
        (key_id,) = re.findall(r"^(\S+) .*\bci\b", listed, re.MULTILINE)
        assert main(["keys", "revoke", key_id]) == 0
        assert station.served.client.get("/v1/jobs", headers=bearer(submitter)).status_code == 401
        changes = station.served.client.get("/v1/audit", headers=bearer(admin)).json()["changes"]
        actions = [each["action"] for each in changes]
        assert actions.index("key.revoked") < actions.index("job.withdrawn") < actions.index("job.submitted")
        assert main(["audit"]) == 0
        assert "job.withdrawn" in capsys.readouterr().out


def test_a_webhook_is_told_of_each_job_and_of_an_alert_and_one_result_answers_twice(
    machine: Machine, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with receiving() as receiver, a_station(machine, url, webhook_allowed_hosts=("127.0.0.1",)) as station:
        client = station.served.client
        asked = {"url": receiver.url(), "events": ["job.finished", "alert.fired"]}
        made = client.post("/v1/webhooks", json=asked)
        assert made.status_code == 201, made.text
        first = station.finished(BATCHES)
        (result,) = station.get(f"/v1/jobs/{first.id}/results")["results"]
        assert result["verdict"]["valid"]
        rule = {"result_id": result["id"], "kind": "threshold", "threshold": 1e6}
        alert = client.post("/v1/alerts", json=rule)
        assert alert.status_code == 201, alert.text

        answered = station.served.submit(BATCHES)
        assert (answered["state"], answered["attempts"]) == ("succeeded", [])
        assert answered["reason"].startswith("Measured before, since ")
        assert answered["variants"][0]["result_id"] == result["id"]
        second = station.finished({**BATCHES, "fresh": True})
        assert second.attempts

        def told() -> list[tuple[str, str]]:
            bodies = [json.loads(each.body) for each in receiver.received]
            return sorted((each["type"], each["data"]["job_id"]) for each in bodies)

        jobs = sorted((first.id, answered["id"], second.id))
        expected = [("alert.fired", second.id), *(("job.finished", each) for each in jobs)]
        assert eventually(lambda: told() == expected), told()
        (fired,) = station.get("/v1/alerts")["alerts"]
        assert fired["fired_at"] is not None
        history = station.get(f"/v1/results/{result['id']}/history")
        assert len(history["points"]) == 2
