"""Simulated devices: each report arrives once, whatever happens on the way, and none ranks."""

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from api import device_command
from optigpu.client import Client
from tests.edge.fleet import audit, run_fleet
from tests.service.processes import Processes, stop, watched_processes
from tests.service.test_api_process import address, environment

MANY = {"OPTIGPU_RATE_LIMIT": "100000/minute", "OPTIGPU_DEVICE_RATE_LIMIT": "10000/minute"}
RATES = {
    "lost_answer": 0.1,
    "upload_reset": 0.1,
    "reboot": 0.15,
    "storage_full": 0.1,
    "unsynchronised": 0.3,
    "skew": 0.3,
    "drift": 0.5,
}


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
        killer = Killer(processes, first, url)
        killer.start()
        accounts, faults = run_fleet(url, wanted, RATES, seconds=10, drain_s=60)
        killer.join()
        with Client(url) as client:
            ids = [account.device_id for account in accounts if account.device_id]
            stored = {each: list(client.device_reports(each)) for each in ids}
        assert audit(accounts, stored) == {}
        fates = [fate for account in accounts for fate in account.made.values()]
        reports = [report for of_device in stored.values() for report in of_device]
        assert len(fates) >= 20
        assert len(reports) == fates.count("kept")
        assert sum(account.boots for account in accounts) > 8, "the power was cut at least once"
        assert set(+faults) >= {"lost_answer", "upload_reset", "reboot"}
        assert all("simulator" in each.reasons and "few_windows" in each.reasons for each in reports)
        assert "clock_unsynchronised" in {flag for each in reports for flag in each.flags}
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
