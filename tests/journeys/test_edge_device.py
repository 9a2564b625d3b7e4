"""A small device joins a service by an invitation, reports what it measured, and stands on the edge leaderboard."""

import json
import re
import sys
from pathlib import Path

import pytest

from api.__main__ import main
from tests.edge.test_agent_end_to_end import ROOT, agent, finish, simulated_device
from tests.journeys.machine import Station

pytestmark = pytest.mark.slow


def test_an_agent_enrols_reports_and_is_listed_with_why_it_does_not_rank(
    on_sqlite: Station, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chip is simulated, which its invitation says and its reports repeat: such figures never rank."""
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", on_sqlite.database_url)
    assert main(["devices", "invite", "--simulator", "--name", "on my desk"]) == 0
    (code,) = re.findall(r"\b[0-9A-Z]{4}(?:-[0-9A-Z]{4}){3}\b", capsys.readouterr().out)
    config = simulated_device(tmp_path / "device", on_sqlite.url, invite=code)
    finish(agent([sys.executable], ROOT, config, runs=2), config)

    (device,) = on_sqlite.get("/v1/devices")["devices"]
    assert (device["name"], device["board"]) == ("on my desk", "esp32s3-n16r8")
    reports = on_sqlite.get(f"/v1/devices/{device['id']}/reports")["reports"]
    assert [each["document"]["sequence"] for each in reports] == [2, 1]
    assert {each["ranked"] for each in reports} == {False}
    assert "on my desk" not in json.dumps(on_sqlite.read("leaderboard", "--edge"))
    every = on_sqlite.read("leaderboard", "--edge", "--include-unranked")
    assert "simulator" in json.dumps(every)
