"""The benchmark of forged reports finds none that is accepted, and would say so."""

import json
from pathlib import Path

import pytest

from benchmarks import forged_reports
from benchmarks.forgeries import KINDS

pytestmark = pytest.mark.slow


def test_nothing_forged_is_accepted_and_everything_honest_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert forged_reports.main(["--reports", "600", "--devices", "2", "--output", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert set(figures["kinds"]) == {*KINDS, "honest"}
    assert not any(kind["accepted"] for kind in figures["kinds"].values())
    assert (figures["honest_lost"], figures["stored_otherwise"]) == (0, 0)
    assert figures["honest_reports"] >= 30
    assert "Forged requests: 600, accepted: 0 (goal: 0)" in capsys.readouterr().out


def test_what_is_accepted_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request with the device's own key is as good as an honest one."""
    monkeypatch.setattr(forged_reports, "KINDS", {"in_disguise": lambda world: world.device.honest()})
    assert forged_reports.main(["--reports", "4", "--devices", "1"]) == 1
    assert "accepted: 0 (goal: 0)" not in capsys.readouterr().out
