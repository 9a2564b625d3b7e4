"""Simulated devices: each report arrives once, whatever happens on the way, and none ranks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api import device_command
from optigpu.cli.device_sim import audited, period_of, read_codes, register_model
from optigpu.client import Client
from optigpu.documents.manifest import ModelManifest
from optigpu.edge.simulation import fleet
from optigpu.edge.simulation.audit import audit, digest_of, stored_report
from optigpu.edge.simulation.documents import DeviceAccount, MadeReport, StoredReport
from optigpu.edge.simulation.fleet import FleetError, FleetPlan, read_faults, run_fleet, simulated_model
from optigpu.edge.simulation.manifest import manifest_of
from optigpu.vocabulary import SpecError
from tests.service.processes import Processes, eventually, stop, watched_processes
from tests.service.test_api_process import address, environment

BOOT = "00112233445566aa"
MANY = {"OPTIGPU_RATE_LIMIT": "100000/minute", "OPTIGPU_DEVICE_RATE_LIMIT": "10000/minute"}


def made(sequence: int, **changes: Any) -> MadeReport:
    fields: dict[str, Any] = {
        "fate": "kept",
        "acknowledged": True,
        "waits": False,
        "digest": f"digest {sequence}",
    }
    return MadeReport(boot_id=BOOT, sequence=sequence, **(fields | changes))


def an_account(*reports: MadeReport, device_id: str | None = "one") -> DeviceAccount:
    return DeviceAccount(
        kind="account", device_id=device_id, boots=1, reports=reports, quarantined={"simulator": 1}, conflicts=0,
        statuses={"200": 2}, faults={}, latencies_us=tuple(range(1000, 101_000, 1000)),
    )  # fmt: skip


def held(sequence: int, **changes: Any) -> StoredReport:
    fields: dict[str, Any] = {"digest": f"digest {sequence}", "source": "simulator", "ranked": False}
    return StoredReport(boot_id=BOOT, sequence=sequence, **(fields | changes))


def test_an_account_that_agrees_is_right() -> None:
    found = audit([an_account(made(1), made(2))], {"one": [held(1), held(2)]}, devices=1, seconds=2.0)
    assert (found.is_right, found.made, found.acknowledged, found.stored, found.lost) == (True, 2, 2, 2, 0)
    assert (found.requests.p50_ms, found.requests.p99_ms, found.requests.max_ms) == (51.0, 100.0, 100.0)
    assert (found.statuses, found.quarantined) == ({"200": 2}, {"simulator": 1})


@pytest.mark.parametrize(
    ("report", "stored", "figure"),
    [
        (made(1, acknowledged=False), [], "lost"),
        (made(1), [], "unstored"),
        (made(1), [held(1), held(1)], "duplicated"),
        (made(1), [held(1, digest="another")], "altered"),
        (made(1), [held(1), held(7)], "foreign"),
        (made(1), [held(1, ranked=True)], "ranked"),
        (made(1), [held(1, source="device")], "ranked"),
    ],
)
def test_an_account_that_does_not_agree_is_wrong(
    report: MadeReport, stored: list[StoredReport], figure: str
) -> None:
    found = audit([an_account(report)], {"one": stored}, devices=1, seconds=2.0)
    assert not found.is_right
    assert getattr(found, figure) == 1


@pytest.mark.parametrize(
    ("changes", "figure"),
    [({"waits": True}, "waiting"), ({"fate": "cut"}, "cut"), ({"fate": "dropped"}, "dropped")],
)
def test_what_waits_and_what_no_queue_ever_held_is_not_lost(changes: dict[str, Any], figure: str) -> None:
    report = made(1, acknowledged=False, **changes)
    found = audit([an_account(report)], {"one": []}, devices=1, seconds=2.0)
    assert (found.is_right, found.lost, getattr(found, figure)) == (True, 0, 1)


def test_a_device_that_did_not_enrol_is_wrong() -> None:
    assert not audit([an_account(device_id=None)], {}, devices=1, seconds=2.0).is_right
    assert not audit([an_account()], {"one": []}, devices=2, seconds=2.0).is_right


def test_the_simulated_model_has_a_manifest_that_never_ranks() -> None:
    manifest = ModelManifest.model_validate(manifest_of(simulated_model()))
    assert not manifest.rankable
    assert manifest.golden.count == 2


def test_the_faults_are_those_of_the_simulator() -> None:
    from esp32_agent.port.simulated.faults import RATES

    assert fleet.FAULTS == RATES
    assert read_faults("all") == RATES
    assert read_faults("none") == {}
    assert read_faults("reboot=0.5, drift=0") == {"reboot": 0.5, "drift": 0.0}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rebot=0.1", "Unknown fault 'rebot'. Valid: lost_answer,"),
        ("reboot", "write none, all, or shares"),
        ("reboot=1", "A share is 0 to 0.9."),
        ("reboot=nan", "A share is 0 to 0.9."),
    ],
)
def test_faults_that_there_are_not_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_faults(text)
    assert sentence in str(caught.value)


def test_a_rate_is_a_period_of_whole_seconds() -> None:
    assert [period_of(text) for text in ("1/s", "60/m", "6/m", "1/h", "2 / m")] == [1, 1, 10, 3600, 30]
    for text in ("2/s", "0/s", "1", "x/s", "1/d", "1.5/s"):
        with pytest.raises(SpecError, match="write 1/s, 6/m or 1/h"):
            period_of(text)


def test_too_few_codes_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "codes").write_text("AAAA-BBBB-CCCC-DDDD\n\n")
    assert read_codes(str(tmp_path / "codes"), 1) == ["AAAA-BBBB-CCCC-DDDD"]
    with pytest.raises(SpecError, match="holds 1 codes, and 2 devices need 2: `python -m api devices invite"):
        read_codes(str(tmp_path / "codes"), 2)
    with pytest.raises(SpecError, match="cannot be read"):
        read_codes(str(tmp_path / "none"), 1)


def test_without_a_checkout_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fleet, "CHECKOUT", tmp_path)
    with pytest.raises(FleetError, match="which is not in the package: use a checkout"):
        simulated_model()


@contextmanager
def an_api(folder: Path, database_url: str) -> Iterator[tuple[Processes, str]]:
    """A service in a process of its own, on a port that it may be started at again."""
    with watched_processes(
        folder, environment(folder, OPTIGPU_DATABASE_URL=database_url) | MANY
    ) as processes:
        process = processes.start("api", "--port", "0")
        yield processes, address(processes)
        stop(process)


def codes(database_url: str, count: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[str]:
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", database_url)
    assert device_command.main(["invite", "--simulator", "--count", str(count)]) == 0
    printed = capsys.readouterr()
    assert "each of these codes" in printed.err
    return str(printed.out).split()


@pytest.mark.slow
def test_each_report_arrives_once_through_a_restart_and_every_fault(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight devices with many faults; the service is killed while they report, and started again."""
    with watched_processes(
        tmp_path, environment(tmp_path, OPTIGPU_DATABASE_URL=database_url) | MANY
    ) as processes:
        first = processes.start("api", "--port", "0")
        url = address(processes)
        wanted = codes(database_url, 8, monkeypatch, capsys)
        faults = read_faults(
            "lost_answer=0.1,upload_reset=0.1,reboot=0.15,storage_full=0.1,unsynchronised=0.3,skew=0.3,drift=0.5"
        )
        plan = FleetPlan(url=url, seconds=6, drain_s=60, send_every_s=0, seed=7, faults=faults, processes=1)
        killer = Killer(processes, first, url)
        with Client(url) as client:
            register_model(client)
            killer.start()
            accounts = run_fleet(plan, wanted)
            killer.join()
            found = audited(client, accounts, 8, plan.seconds)
            assert found.is_right, found
            assert (found.lost, found.unstored, found.duplicated, found.ranked) == (0, 0, 0, 0)
            assert found.made >= 20
            assert found.stored == found.made - found.cut - found.dropped
            assert found.boots > 8, "the power was cut at least once"
            assert set(found.faults) >= {"lost_answer", "upload_reset", "reboot"}
            reports = [
                each
                for account in accounts
                if account.device_id
                for each in client.device_reports(account.device_id)
            ]
        assert {(each.source, each.ranked) for each in reports} == {("simulator", False)}
        assert all("simulator" in each.reasons and "few_windows" in each.reasons for each in reports)
        flags = {flag for each in reports for flag in each.flags}
        assert "clock_unsynchronised" in flags
        for number in range(2):
            assert "Traceback" not in processes.output(number).read_text()
        stop(killer.second)


class Killer(threading.Thread):
    """Two seconds after the start it kills the service, and starts it again at the same port."""

    second: subprocess.Popen[bytes]

    def __init__(self, processes: Processes, first: subprocess.Popen[bytes], url: str) -> None:
        super().__init__()
        self._processes, self._first, self._port = processes, first, url.rpartition(":")[2]

    def run(self) -> None:
        time.sleep(2)
        self._first.kill()
        self._first.wait()
        self.second = self._processes.start("api", "--port", self._port)


def command(*arguments: str, **streams: Any) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    words = [sys.executable, "-m", "optigpu", "device-sim", *arguments]
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=dict(os.environ))


@pytest.mark.slow
def test_the_command_prints_the_account_and_ctrl_c_ends_it_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    database_url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with an_api(tmp_path, database_url) as (_, url):
        wanted = codes(database_url, 5, monkeypatch, capsys)
        (tmp_path / "codes").write_text("\n".join(wanted))
        options = ("--url", url, "--send-every", "0")
        whole = command("--devices", "2", "--for", "2s", "--codes", "-", "--format", "json", *options)
        out, err = whole.communicate("\n".join(wanted[3:]))
        assert whole.returncode == 0, err
        document = json.loads(out)
        assert (document["enrolled"], document["lost"], document["duplicated"]) == (2, 0, 0)
        assert document["stored"] >= 2
        endless = command("--devices", "3", "--for", "1h", "--codes", str(tmp_path / "codes"), *options)
        refused = command("--devices", "2", "--for", "1s", "--drain", "1s", "--codes", "-", *options)
        out, _ = refused.communicate("\n".join(wanted[3:]))
        assert refused.returncode == 1, "their codes are used"
        assert "0 of 2" in out
        assert eventually(lambda: len(httpx.get(f"{url}/v1/devices", timeout=30).json()["devices"]) == 5)
        endless.send_signal(signal.SIGINT)
        out, err = endless.communicate(timeout=60)
        assert endless.returncode == 130, err
        assert "3 simulated devices for" in out


def test_a_stored_report_has_the_digest_of_its_document() -> None:
    document = {"boot_id": BOOT, "sequence": 3, "windows": [{"count": 1}]}
    found = stored_report(dict(reversed(document.items())), "simulator", False)
    assert (found.sequence, found.digest) == (3, digest_of(document))
