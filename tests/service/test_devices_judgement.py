"""What the service makes of reports that are signed: which rank, which it does not believe, and that none is forged."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from benchmarks import forged_reports
from benchmarks.forgeries import KINDS
from benchmarks.signing_device import MODEL, RUN_US
from optigpu.documents.devices import DeviceSource
from optigpu.store.tables import DeviceRun
from tests.service.device_client import EdgeDevice, enrolled, manifest, report
from tests.service.serving import Served

RUN = timedelta(microseconds=RUN_US)
SECOND_US = 1_000_000


@pytest.fixture
def device(service: Served) -> EdgeDevice:
    """A device that has just enrolled, and the model that it reports on."""
    service.client.post("/v1/edge/models", json=manifest())
    return enrolled(service.client, service.database)


def begun(service: Served, device: EdgeDevice, ago: timedelta = RUN, model: str = MODEL) -> str:
    """A run whose start the service saw so long ago."""
    run_id = device.run(model)
    with service.database.write() as session:
        began = update(DeviceRun).where(DeviceRun.id == run_id)
        session.execute(began.values(started_at=session.get_one(DeviceRun, run_id).started_at - ago))
    return run_id


def judged(device: EdgeDevice, sent: dict[str, Any], **more: Any) -> tuple[str, bool, list[str]]:
    (answer,) = device.reports(sent, **more)
    return answer["state"], answer["ranked"], answer["reasons"]


def test_an_honest_report_that_waited_in_the_queue_ranks(service: Served, device: EdgeDevice) -> None:
    """After the run the network was away for an hour; after a reboot nobody knows how long."""
    ago = RUN + timedelta(hours=1)
    known = report(1, begun(service, device, ago))
    assert judged(device, known, waited_us=3600 * SECOND_US) == ("accepted", True, [])
    unknown = report(2, begun(service, device, ago))
    assert judged(device, unknown, waited_us=None) == ("accepted", True, [])


def test_an_unknown_model_is_quarantined(service: Served, device: EdgeDevice) -> None:
    other = "0" * 64
    sent = report(1, begun(service, device, model=other), model_sha256=other)
    assert judged(device, sent) == ("quarantined", False, ["model_unknown"])


def test_a_model_of_random_calibration_does_not_rank(service: Served, device: EdgeDevice) -> None:
    other = "0" * 64
    calibration = {"kind": "random", "samples": 10}
    document = manifest(sha256=other, rankable=False, calibration=calibration)
    assert service.client.post("/v1/edge/models", json=document).status_code == 201
    sent = report(1, begun(service, device, model=other), model_sha256=other)
    assert judged(device, sent) == ("accepted", False, ["model_not_rankable"])


def test_a_run_that_this_device_never_began_is_quarantined(service: Served, device: EdgeDevice) -> None:
    other = enrolled(service.client, service.database)
    of_other = begun(service, other)
    for sequence, run_id in enumerate((of_other, "01980000-0000-7000-8000-000000000000"), start=1):
        assert judged(device, report(sequence, run_id)) == ("quarantined", False, ["run_unknown"])
    of_other_boot = report(3, begun(service, device), boot_id="b" * 16)
    assert judged(device, of_other_boot) == ("quarantined", False, ["run_unknown"])


def test_a_run_is_reported_once(service: Served, device: EdgeDevice) -> None:
    run_id = begun(service, device)
    answers = device.reports(report(1, run_id), report(2, run_id))
    assert [answer["reasons"] for answer in answers] == [[], ["run_reused"]]


def test_a_device_that_claims_more_time_than_passed_is_quarantined(
    service: Served, device: EdgeDevice
) -> None:
    """It says that 55 s passed, and the service saw 20."""
    sent = report(1, begun(service, device, timedelta(seconds=20)))
    assert judged(device, sent) == ("quarantined", False, ["longer_than_observed"])
    waited = report(2, begun(service, device))
    answer = judged(device, waited, waited_us=600 * SECOND_US)
    assert answer == ("quarantined", False, ["longer_than_observed"])


def test_faster_than_the_chip_can_be_is_quarantined(service: Served, device: EdgeDevice) -> None:
    """11 million multiply-accumulates in 1 ms, at 240 MHz."""
    windows = [{"count": 10_048, "total_us": 10_048_000, "energy_uj": 5_124_000}] * 5
    latency = {"count": 50_240, "min": 999, "p50": 1000, "p90": 1001, "p99": 1002}
    sent = report(1, begun(service, device), windows=windows, latency_us=latency)
    assert judged(device, sent) == ("quarantined", False, ["faster_than_roofline"])


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"windows": [{"count": 160, "total_us": 12_560_000, "energy_uj": None}] * 4}, ["few_windows"]),
        (
            {"windows": [{"count": 128, "total_us": 10_048_000, "energy_uj": None}] * 4
             + [{"count": 128, "total_us": 9_999_999, "energy_uj": None}]},
            ["few_windows"],
        ),
        ({"runner": {"name": "tflm-host", "version": "1"}}, ["host"]),
        ({"runner": {"name": "litert-host", "version": "1"}}, ["host"]),
        ({"runner": {"name": "simulator", "version": "1"}}, ["simulator"]),
        ({"error": "The camera is away."}, ["error"]),
    ],
)  # fmt: skip
def test_what_is_true_and_does_not_rank(
    any_service: Served, changes: dict[str, Any], reasons: list[str]
) -> None:
    any_service.client.post("/v1/edge/models", json=manifest())
    device = enrolled(any_service.client, any_service.database)
    sent = report(1, begun(any_service, device), **changes)
    assert judged(device, sent) == ("accepted", False, reasons)


def test_a_simulated_device_ranks_nowhere(service: Served) -> None:
    service.client.post("/v1/edge/models", json=manifest())
    device = enrolled(service.client, service.database, source=DeviceSource.SIMULATOR)
    sent = report(1, begun(service, device))
    assert judged(device, sent) == ("accepted", False, ["simulator"])
    (stored,) = service.client.get(f"/v1/devices/{device.id}/reports").json()["reports"]
    assert stored["source"] == "simulator"


def test_a_duplicate_is_not_judged_again(service: Served, device: EdgeDevice) -> None:
    """Its model was not known when it came first; the answer stays."""
    other = "0" * 64
    sent = report(1, begun(service, device, model=other), model_sha256=other)
    (first,) = device.reports(sent)
    service.client.post("/v1/edge/models", json=manifest(sha256=other))
    assert device.reports(sent) == [first | {"duplicate": True}]


@pytest.mark.long
@pytest.mark.slow
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


@pytest.mark.long
@pytest.mark.slow
def test_what_is_accepted_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request with the device's own key is as good as an honest one."""
    monkeypatch.setattr(forged_reports, "KINDS", {"in_disguise": lambda world: world.device.honest()})
    assert forged_reports.main(["--reports", "4", "--devices", "1"]) == 1
    assert "accepted: 0 (goal: 0)" not in capsys.readouterr().out
