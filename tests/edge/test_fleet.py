"""Simulated devices against a service: each report arrives once, whatever happens on the way, and none ranks.

The devices have the agent's real core on a port with seeded faults, each a thread of this process. Its account says
what became of each of its reports; `audit` holds the accounts against what the service has.
"""

import hashlib
import http.client
import json
import random
import secrets
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from api import commands
from esp32_agent.core.agent import IDLE, SEND, START, Agent, Settings
from esp32_agent.core.message import Item
from esp32_agent.core.queue import Queue
from esp32_agent.port import base
from esp32_agent.port.simulator import SimulatedRunner
from optigpu.client import Client
from optigpu.documents.devices import DeviceReportView
from tests.service.processes import Processes, address, environment, eventually, stop, watched_processes

TICKS, HOUR_US, NEVER_US, BOOT_S = 1 << 30, 3_600_000_000, 1 << 62, 0.2
ENDS_WITHIN_S = 240.0
"""A device's whole life here is some 15 s; on a busy machine the service alone takes longer to come back."""
INPUT_BYTES, OUTPUT_BYTES, QUEUE_BYTES = 192, 10, 65_536
MODEL_SHA256 = hashlib.sha256(b"OptiGPU's simulated model").hexdigest()

Identity = tuple[str, int]
"""Of a report: boot id and sequence."""


class Reboot(BaseException):
    """The power was cut: nothing on the device may catch it."""


class Faults:
    """What goes wrong on a device, by its share of requests, reports or devices; `counts` says how often it did."""

    def __init__(self, rates: Mapping[str, float], seed: str) -> None:
        self._rates, self.random = rates, random.Random(seed)
        self.counts: Counter[str] = Counter()

    def strikes(self, name: str) -> bool:
        struck = self.random.random() < self._rates.get(name, 0.0)
        self.counts[name] += struck
        return struck


@dataclass
class Account:
    """What a device knows of its own reports. `made`: each is "kept" in its queue, "cut" off by a power cut while
    it was stored, or "dropped" by a full medium."""

    device_id: str | None = None
    made: dict[Identity, str] = field(default_factory=dict)
    digests: dict[Identity, str] = field(default_factory=dict)
    acknowledged: set[Identity] = field(default_factory=set)
    waiting: set[Identity] = field(default_factory=set)
    conflicts: int = 0
    boots: int = 0

    def seen(self, path: str, body: bytes, status: int, data: bytes) -> None:
        """An answer that arrived."""
        if path == "/v1/devices/claim" and status in (200, 201):
            self.device_id = json.loads(data)["device_id"]
        elif path.endswith("/measurements") and status == 200:
            pairs = zip(json.loads(body)["reports"], json.loads(data)["reports"], strict=True)
            for report, answer in ((sent["report"], answer) for sent, answer in pairs):
                identity = (report["boot_id"], report["sequence"])
                self.digests[identity] = digest_of(report)
                if answer["state"] == "conflict":
                    self.conflicts += 1
                else:
                    self.acknowledged.add(identity)


class FleetClock(base.Clock):
    """Real time; its ticks wrap around as a board's, and may be off."""

    def __init__(self, faults: Faults) -> None:
        draw = faults.random.uniform
        self._speed = 1 + (draw(-0.01, 0.01) if faults.strikes("drift") else 0.0)
        self._first = int(draw(0, TICKS))
        self._is_set = not faults.strikes("unsynchronised")
        self._skew_us = int(draw(1, 24) * HOUR_US) if faults.strikes("skew") else 0

    def ticks_us(self) -> int:
        return (self._first + int(time.monotonic() * 1e6 * self._speed)) % TICKS

    def ticks_diff(self, later: int, earlier: int) -> int:
        return (later - earlier + TICKS // 2) % TICKS - TICKS // 2

    def sleep_ms(self, ms: int) -> None:
        time.sleep(ms / 1000)

    def unix_us(self) -> int:
        return time.time_ns() // 1000 + self._skew_us if self._is_set else 0

    def synchronise(self) -> bool:
        return self._is_set


class FleetStorage(base.Storage):
    """Files in memory that outlive a reboot. With `is_cut` the power ends within the next bytes that are appended."""

    def __init__(self, faults: Faults) -> None:
        self._faults, self.is_cut = faults, False
        self._files: dict[str, bytes] = {}

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes | None:
        data = self._files.get(name)
        return None if data is None else data[offset:] if size < 0 else data[offset : offset + size]

    def append(self, name: str, data: bytes) -> None:
        is_full = not self.is_cut and len(data) > 64 and self._faults.strikes("storage_full")
        part = self._faults.random.randint(0, len(data)) if self.is_cut or is_full else len(data)
        self._files[name] = self._files.get(name, b"") + data[:part]
        if self.is_cut:
            self.is_cut = False
            raise Reboot
        if is_full:
            raise base.StorageFullError("The simulated medium is full.")

    def replace(self, name: str, data: bytes) -> None:
        self._files[name] = data

    def truncate(self, name: str, size: int) -> None:
        self._files[name] = self._files[name][:size]

    def size(self, name: str) -> int:
        return len(self._files.get(name, b""))

    def remove(self, name: str) -> None:
        self._files.pop(name, None)


class FleetHttp(base.Http):
    """Real requests to a service, with the faults of a network."""

    def __init__(self, url: str, storage: FleetStorage, faults: Faults, account: Account) -> None:
        address = urlsplit(url)
        self.connection = http.client.HTTPConnection(address.hostname or "", address.port)
        self._storage, self._faults, self._account = storage, faults, account

    def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: int
    ) -> tuple[int, dict[str, str], bytes]:
        cut = ""
        if self._faults.strikes("reboot"):
            cut = self._faults.random.choice(("before", "after", "storing"))
        self._storage.is_cut = cut == "storing"
        if cut == "before":
            raise Reboot
        self.connection.timeout = timeout_s
        is_reset = self._faults.strikes("upload_reset")
        try:
            sent, length = body[: len(body) // 2] if is_reset else body, {"Content-Length": str(len(body))}
            self.connection.request(method, path, sent, headers | length)
            if is_reset:
                raise ConnectionResetError("in the middle of the upload")
            answer = self.connection.getresponse()
            status, answered, data = answer.status, answer.getheaders(), answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            raise base.HttpError(f"{type(error).__name__}: {error}") from None
        if cut == "after":
            raise Reboot
        if self._faults.strikes("lost_answer"):
            self.connection.close()
            raise base.HttpError("The answer was lost.")
        self._account.seen(path, body, status, data)
        return status, {name.lower(): value for name, value in answered}, data


class Surroundings(base.Network, base.Camera):
    """A network that is always joined, and one and the same input."""

    def connect(self) -> bool:
        return True

    def rssi(self) -> int | None:
        return None

    def frame(self) -> bytes:
        return bytes(INPUT_BYTES)


class FleetBoard(base.Board):
    name, clock_hz = "esp32s3-n16r8", 240_000_000
    firmware_sha256 = hashlib.sha256(b"OptiGPU's simulated firmware").hexdigest()

    def __init__(self, number: int) -> None:
        self._number = number

    def reset_reason(self) -> str:
        return "power_on"

    def heap_free(self) -> int:
        return 100_000

    def unique_id(self) -> str:
        return f"{self._number:012x}"

    def random_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)

    def collect(self) -> None:
        pass


class WatchedAgent(Agent):
    """The agent, which notes each report that it makes. `drain` ends measuring and leaves the sending."""

    account: Account

    def drain(self) -> None:
        """No further run. To be called before each step, since an enrolment leads to a run."""
        if self._run_at != NEVER_US:
            self._run_at, self._send_at = NEVER_US, min(self._send_at, self.uptime.us())
        self.state = SEND if self.state == START else self.state

    def _report(self) -> None:
        run, before = self._run, self.queue.dropped
        made = () if run is None else ((run.boot_id, run.sequence),)
        self.account.made |= dict.fromkeys(made, "cut")
        super()._report()
        self.account.made |= dict.fromkeys(made, "kept" if self.queue.dropped == before else "dropped")


def live(url: str, number: int, code: str, faults: Faults, reports: int) -> Account:
    """The account of a device that makes so many reports and sends them all."""
    account, clock, storage, around = Account(), FleetClock(faults), FleetStorage(faults), Surroundings()
    network, board = FleetHttp(url, storage, faults, account), FleetBoard(number)
    settings = Settings(code, period_s=1, window_s=0, warmup=1, start_attempts=1, retry_most_ms=4000)
    ends = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < ends:
        account.boots += 1
        runner = SimulatedRunner(clock, MODEL_SHA256, INPUT_BYTES, OUTPUT_BYTES, latency_ms=5)
        port = base.Port(clock, around, network, storage, base.Power(), runner, around, board)
        agent = WatchedAgent(port, settings)
        agent.account = account
        try:
            while time.monotonic() < ends:
                if len(account.made) >= reports:
                    agent.drain()
                    if agent.state == IDLE and agent.queue.depth == 0:
                        break
                agent.step()
            break
        except Reboot:
            network.connection.close()
            time.sleep(BOOT_S)
    network.connection.close()
    left = Queue(storage, QUEUE_BYTES).batch(1_000_000, 1 << 30)
    account.waiting = {(item.boot_id, item.sequence) for item in map(Item, left)}
    return account


def run_fleet(
    url: str, codes: Sequence[str], rates: Mapping[str, float], reports: int
) -> tuple[list[Account], Counter[str]]:
    """A device for each code, and the faults of all together."""
    faults = [Faults(rates, seed=f"7/{number}") for number in range(len(codes))]
    with ThreadPoolExecutor(len(codes)) as devices:
        begun = [
            devices.submit(live, url, number, code, faults[number], reports)
            for number, code in enumerate(codes)
        ]
        accounts = [device.result() for device in begun]
    return accounts, sum((each.counts for each in faults), Counter())


def audit(accounts: Sequence[Account], stored: Mapping[str, Sequence[DeviceReportView]]) -> dict[str, int]:
    """How many reports are not as they must be, by what is wrong: `lost` ones were kept by a device and wait in no
    queue, `unstored` ones were acknowledged, `foreign` ones are the service's alone."""
    wrong: Counter[str] = Counter()
    for account in accounts:
        wrong["not enrolled"] += account.device_id is None
        wrong["conflicts"] += account.conflicts
        documents = [(each.document, each) for each in stored.get(account.device_id or "", ())]
        held = Counter((document["boot_id"], document["sequence"]) for document, _ in documents)
        kept = {identity for identity, fate in account.made.items() if fate == "kept"}
        wrong["lost"] += len(kept - account.waiting - held.keys())
        wrong["unstored"] += len(account.acknowledged - held.keys())
        wrong["duplicated"] += held.total() - len(held)
        wrong["foreign"] += len(held.keys() - account.made.keys())
        for document, report in documents:
            known = account.digests.get((document["boot_id"], document["sequence"]))
            wrong["altered"] += known not in (None, digest_of(document))
            wrong["ranked"] += report.ranked or report.source != "simulator"
    return {name: count for name, count in wrong.items() if count}


def digest_of(report: Mapping[str, Any]) -> str:
    """Of a report, however its JSON is written."""
    return hashlib.sha256(json.dumps(report, sort_keys=True).encode()).hexdigest()


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
    assert commands.devices_command(["invite", "--simulator", "--count", str(count)]) == 0
    printed = capsys.readouterr()
    assert "each of these codes" in printed.err
    return str(printed.out).split()


@pytest.mark.long
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
        accounts, faults = run_fleet(url, wanted, RATES, reports=6)
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
    """Once a device has sent a message it kills the service, and starts it again at the same port."""

    second: subprocess.Popen[bytes]

    def __init__(self, processes: Processes, first: subprocess.Popen[bytes], url: str) -> None:
        super().__init__()
        self._processes, self._first, self._url = processes, first, url

    def run(self) -> None:
        assert eventually(self._has_heard)
        self._first.kill()
        self._first.wait()
        self.second = self._processes.start("api", "--port", self._url.rpartition(":")[2])

    def _has_heard(self) -> bool:
        devices = httpx.get(f"{self._url}/v1/devices", timeout=30).json()["devices"]
        return any(each["boot_id"] for each in devices)
