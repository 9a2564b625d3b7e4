"""A device for tests of the service: its key, its signatures, and reports that are true as far as anybody can tell.

It is written from the description of the protocol alone and shares no code with the service or the agent.
"""

import hashlib
import hmac
import json
import secrets
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx

from api.device_command import invite
from optigpu.documents.devices import DeviceSource
from optigpu.store.database import Database

BOARD = "esp32s3-n16r8"
FIRMWARE = hashlib.sha256(b"firmware").hexdigest()
MODEL = hashlib.sha256(b"model").hexdigest()
OUTPUTS = ("7f80", "807f", "0a0b")
JSON = {"Content-Type": "application/json"}
RANKED_RUN_US = 55_000_000
"""The device's time for a run of five windows of 10 s."""


def sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def hmac256(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


def now_us() -> int:
    return time.time_ns() // 1000


def manifest(**changes: Any) -> dict[str, Any]:
    """A model with 11 million multiply-accumulates."""
    document: dict[str, Any] = {
        "schema": 1,
        "sha256": MODEL,
        "network": {"family": "mobilenet_v2", "alpha": "0.35", "input": [96, 96, 3], "classes": 2},
        "model_bytes": 580_000,
        "operators": [{"name": "CONV_2D", "count": 35, "macs": 11_000_000}],
        "macs": 11_000_000,
        "parameter_bytes": 400_000,
        "arena_bytes": 120_000,
        "input": {"shape": [1, 96, 96, 3], "dtype": "int8", "scale": 0.0078125, "zero_point": -1},
        "output": {"shape": [1, 2], "dtype": "int8", "scale": 0.00390625, "zero_point": -128},
        "agreement": {"samples": 200, "top1": 0.985, "kld_mean": 0.004},
        "calibration": {"kind": "images", "samples": 200},
        "rankable": True,
        "golden": {"count": len(OUTPUTS), "inputs_sha256": sha256(b"inputs"), "outputs": list(OUTPUTS)},
        "tools": {"tensorflow": "2.21.0"},
    }
    return document | changes


def golden(run_id: str | None, outputs: tuple[str, ...] = OUTPUTS) -> dict[str, Any]:
    """What a device that computes the outputs reports."""
    text = (run_id or "").encode() + b"".join(map(bytes.fromhex, outputs))
    return {"count": len(outputs), "digest": sha256(text)}


def report(sequence: int = 1, run_id: str | None = None, **changes: Any) -> dict[str, Any]:
    """Five windows of 10 s with 128 inferences each, at half a watt."""
    document: dict[str, Any] = {
        "schema": 1,
        "boot_id": "00c0ffee00c0ffee",
        "sequence": sequence,
        "run_id": run_id,
        "model_sha256": MODEL,
        "input_bytes": 27_648,
        "input_source": "fixed",
        "runner": {"name": "tflm-native", "version": "1.3.2"},
        "board": BOARD,
        "clock_hz": 240_000_000,
        "firmware_sha256": FIRMWARE,
        "warmup": 10,
        "windows": [{"count": 128, "total_us": 10_048_000, "energy_uj": 5_124_000}] * 5,
        "latency_us": {"count": 640, "min": 78_310, "p50": 78_480, "p90": 78_900, "p99": None},
        "power": {"source": "ina226", "idle_uw": 212_000},
        "golden": golden(run_id),
        "arena_bytes": 120_000,
        "heap_free": 7_900_000,
        "started_us": now_us() - RANKED_RUN_US,
        "ticks_us": RANKED_RUN_US,
        "error": None,
    }
    return document | changes


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
        public, *secret = self.code.split("-")
        verifier = hashlib.sha256(b"optigpu-claim:" + "".join(secret).encode()).digest()
        sealed = xor(self.key, hmac256(verifier, f"optigpu-seal:{self.nonce}")).hex()
        proof = hmac256(verifier, f"optigpu-proof:{self.nonce}:{sealed}:{self.board}:{FIRMWARE}").hex()
        return {
            "schema": 1,
            "invite": public,
            "nonce": self.nonce,
            "sealed_key": sealed,
            "proof": proof,
            "board": self.board,
            "firmware": FIRMWARE,
            "name": self.name,
        }


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
            "time": str(now_us()),
            "boot": self.boot,
            "seq": str(self.sequence),
            "fw": FIRMWARE,
        } | {name: str(value) for name, value in changes.items()}
        text = "\n".join(["OptiGPU1", "POST", path, *parts.values(), sha256(body)])
        parts["sig"] = hmac256(self.key, text).hex()
        return "OptiGPU1 " + ",".join(f"{name}={value}" for name, value in parts.items())

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
        nonce = secrets.token_hex(16)
        sealed = xor(key, hmac256(self.key, f"optigpu-rotate:{nonce}")).hex()
        return {"schema": 1, "nonce": nonce, "sealed_key": sealed}


def enrolled(http: httpx.Client, database: Database, **changes: Any) -> EdgeDevice:
    """A device that has just enrolled."""
    claim = Claim(invited(database, **changes))
    answer = http.post("/v1/devices/claim", json=claim.body)
    assert answer.status_code == 201, answer.text
    return EdgeDevice(http, answer.json()["device_id"], claim.key)
