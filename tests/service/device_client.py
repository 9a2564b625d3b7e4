"""A device for tests of the service: its key, its signatures, and reports that are true as far as anybody can tell.

What it signs comes from `benchmarks.signing_device`, which shares no code with the service or the agent.
"""

import hashlib
import json
import secrets
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx

from api.commands import invite
from benchmarks import signing_device
from benchmarks.signing_device import BOARD, FIRMWARE, MODEL, OUTPUTS
from optigpu.documents.devices import DeviceSource
from optigpu.store.database import Database

JSON = {"Content-Type": "application/json"}


def now_us() -> int:
    return time.time_ns() // 1000


def manifest(**changes: Any) -> dict[str, Any]:
    """A model with 11 million multiply-accumulates."""
    return signing_device.manifest() | changes


def golden(run_id: str | None, outputs: tuple[str, ...] = OUTPUTS) -> dict[str, Any]:
    """What a device that computes the outputs reports."""
    text = (run_id or "").encode() + b"".join(map(bytes.fromhex, outputs))
    return {"count": len(outputs), "digest": hashlib.sha256(text).hexdigest()}


def report(sequence: int = 1, run_id: str | None = None, **changes: Any) -> dict[str, Any]:
    """Five windows of 10 s with 128 inferences each, at half a watt."""
    document = signing_device.report("00c0ffee00c0ffee", sequence)
    return document | {"run_id": run_id, "golden": golden(run_id)} | changes


def message(*reports: dict[str, Any], waited_us: int | None = 0, **status: Any) -> dict[str, Any]:
    """A message with these reports."""
    device = {
        "board": BOARD,
        "reset_reason": "power_on",
        "rssi": -61,
        "heap_free": 7_900_000,
        "queue_depth": len(reports),
        "dropped": 0,
        "agent_version": "0.1.0",
        "uptime_us": 93_000_000,
    }
    sent = [{"waited_us": waited_us, "report": each} for each in reports]
    return {"schema": 1, "device": device | status, "reports": sent}


def invited(database: Database, **changes: Any) -> str:
    """A new code."""
    asked: dict[str, Any] = {"name": None, "source": DeviceSource.DEVICE, "lasts": timedelta(minutes=15)}
    return invite(database, **asked | changes)[0].text


@dataclass
class Claim:
    """A claim of a code with a key that the device made."""

    code: str
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    board: str = BOARD
    name: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        return signing_device.claim(self.code, self.key, self.nonce, self.board) | {"name": self.name}


@dataclass
class EdgeDevice:
    """An enrolled device, which counts the requests of its boot."""

    http: httpx.Client
    id: str
    key: bytes
    version: int = 1
    boot: str = "00c0ffee00c0ffee"
    sequence: int = 0

    @property
    def key_id(self) -> str:
        return f"{self.id}.{self.version}"

    def path(self, name: str) -> str:
        """Of one of its calls."""
        return f"/v1/devices/{self.id}/{name}"

    def header(self, path: str, body: bytes, **changes: Any) -> str:
        """The header for a request; `changes` are of what is signed."""
        parts = {
            "key": self.key_id,
            "time": now_us(),
            "boot": self.boot,
            "seq": self.sequence,
            "fw": FIRMWARE,
        }
        return signing_device.header(self.key, path, parts | changes, body)

    def post(self, name: str, document: object, **changes: Any) -> httpx.Response:
        """A signed request with the next sequence."""
        self.sequence += 1
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.send(name, body, self.header(self.path(name), body, **changes))

    def send(self, name: str, body: bytes, header: str) -> httpx.Response:
        """A request as it is."""
        return self.http.post(self.path(name), content=body, headers=JSON | {"Authorization": header})

    def run(self, model: str = MODEL) -> str:
        """Begins a run and returns its id."""
        answer = self.post("runs", {"schema": 1, "model_sha256": model})
        assert answer.status_code == 201, answer.text
        run_id: str = answer.json()["run_id"]
        return run_id

    def reports(self, *reports: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        """Sends reports and returns their answers."""
        answer = self.post("measurements", message(*reports, **more))
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["reports"]
        return found

    def rotation(self, key: bytes) -> dict[str, Any]:
        """The body that hands over a new key."""
        body: dict[str, Any] = json.loads(signing_device.rotation(self.key, key, secrets.token_hex(16)))
        return body


def enrolled(http: httpx.Client, database: Database, **changes: Any) -> EdgeDevice:
    """A device that has just enrolled."""
    claim = Claim(invited(database, **changes))
    answer = http.post("/v1/devices/claim", json=claim.body)
    assert answer.status_code == 201, answer.text
    return EdgeDevice(http, answer.json()["device_id"], claim.key)
