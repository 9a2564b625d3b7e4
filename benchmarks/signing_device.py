"""A device that signs, for tests and the benchmark of forged reports: from docs/edge.md, without the API's code."""

import hashlib
import hmac
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

Identity = tuple[str, str, int]
"""Of a report: device, boot, sequence."""

JSON_TYPE = ("Content-Type", "application/json")
BOARD = "esp32s3-n16r8"
FIRMWARE = hashlib.sha256(b"firmware").hexdigest()
MODEL = hashlib.sha256(b"model").hexdigest()
OUTPUTS = ("7f80", "807f", "0a0b")
INPUT_SHAPE = (1, 96, 96, 3)
RUN_US = 55_000_000
PARTS = ("key", "time", "boot", "seq", "fw")


@dataclass(frozen=True)
class Request:
    """A request as it goes over the wire, and the reports that its body holds."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    identities: frozenset[Identity] = frozenset()

    @property
    def authorization(self) -> str:
        """The value of its header; empty without one."""
        return next((value for name, value in self.headers if name == "Authorization"), "")


@dataclass
class Device:
    """An enrolled device. `rng` draws everything that a real device would draw from its noise."""

    id: str
    key: bytes
    rng: random.Random
    version: int = 1
    boot: str = "00c0ffee00c0ffee"
    sequence: int = 5_000
    reported: int = field(default=0)

    def place(self, name: str) -> str:
        """The path of one of its calls."""
        return f"/v1/devices/{self.id}/{name}"

    def signed(self, name: str, body: bytes, **changes: object) -> Request:
        """A request with the next sequence, signed; `changes` are of what is signed."""
        self.sequence += 1
        parts = {
            "key": f"{self.id}.{self.version}",
            "time": time.time_ns() // 1000,
            "boot": self.boot,
            "seq": self.sequence,
            "fw": FIRMWARE,
        } | changes
        path = self.place(name)
        return Request(path, (JSON_TYPE, ("Authorization", header(self.key, path, parts, body))), body)

    def message(self, count: int = 1, **changes: object) -> tuple[bytes, frozenset[Identity]]:
        """The body of a message with new reports, and their identities; `changes` are of each report."""
        reports = []
        for _ in range(count):
            self.reported += 1
            reports.append(report(self.boot, self.reported) | changes)
        device = {
            "board": BOARD,
            "reset_reason": "power_on",
            "rssi": -self.rng.randint(40, 90),
            "heap_free": 7_900_000,
            "queue_depth": count,
            "dropped": 0,
            "agent_version": "0.1.0",
            "uptime_us": self.rng.randint(1, 10**12),
        }
        sent = [{"waited_us": None, "report": each} for each in reports]
        body = json.dumps({"schema": 1, "device": device, "reports": sent}).encode()
        return body, frozenset((self.id, self.boot, int(each["sequence"])) for each in reports)

    def honest(self) -> Request:
        """A message with one to three reports."""
        body, identities = self.message(self.rng.choice((1, 1, 1, 3)))
        request = self.signed("measurements", body)
        return Request(request.path, request.headers, body, identities)


def header(key: bytes, path: str, parts: dict[str, Any], body: bytes) -> str:
    """The header of a signed POST."""
    text = [str(parts[name]) for name in PARTS]
    lines = ["OptiGPU1", "POST", path, *text, hashlib.sha256(body).hexdigest()]
    signature = mac(key, "\n".join(lines)).hex()
    named = [f"{name}={value}" for name, value in zip(PARTS, text, strict=True)]
    return "OptiGPU1 " + ",".join([*named, f"sig={signature}"])


def claim(code: str, key: bytes, nonce: str, board: str = BOARD) -> dict[str, Any]:
    """The body that enrols a device with this key."""
    public, *secret = code.split("-")
    verifier = hashlib.sha256(b"optigpu-claim:" + "".join(secret).encode()).digest()
    sealed = xor(key, mac(verifier, f"optigpu-seal:{nonce}")).hex()
    proof = mac(verifier, f"optigpu-proof:{nonce}:{sealed}:{board}:{FIRMWARE}").hex()
    return {
        "schema": 1,
        "invite": public,
        "nonce": nonce,
        "sealed_key": sealed,
        "proof": proof,
        "board": board,
        "firmware": FIRMWARE,
    }


def rotation(old: bytes, new: bytes, nonce: str) -> bytes:
    """The body that hands over a new key."""
    sealed = xor(new, mac(old, f"optigpu-rotate:{nonce}")).hex()
    return json.dumps({"schema": 1, "nonce": nonce, "sealed_key": sealed}).encode()


def report(boot: str, sequence: int) -> dict[str, Any]:
    """A report that is true as far as anybody can tell, of a run whose start the service did not see."""
    return {
        "schema": 1,
        "boot_id": boot,
        "sequence": sequence,
        "run_id": None,
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
        "golden": {"count": len(OUTPUTS), "digest": golden(None)},
        "arena_bytes": 120_000,
        "heap_free": 7_900_000,
        "started_us": time.time_ns() // 1000 - RUN_US,
        "ticks_us": RUN_US,
        "error": None,
    }


def golden(run_id: str | None) -> str:
    """The digest of the right outputs."""
    outputs = b"".join(map(bytes.fromhex, OUTPUTS))
    return hashlib.sha256((run_id or "").encode() + outputs).hexdigest()


def manifest() -> dict[str, Any]:
    """The model that the reports are about."""
    return {
        "schema": 1,
        "sha256": MODEL,
        "network": {"family": "mobilenet_v2", "alpha": "0.35", "input": list(INPUT_SHAPE[1:]), "classes": 2},
        "model_bytes": 580_000,
        "operators": [{"name": "CONV_2D", "count": 35, "macs": 11_000_000}],
        "macs": 11_000_000,
        "parameter_bytes": 400_000,
        "arena_bytes": 120_000,
        "input": {"shape": list(INPUT_SHAPE), "dtype": "int8", "scale": 0.0078125, "zero_point": -1},
        "output": {"shape": [1, 2], "dtype": "int8", "scale": 0.00390625, "zero_point": -128},
        "agreement": {"samples": 200, "top1": 0.985, "kld_mean": 0.004},
        "calibration": {"kind": "images", "samples": 200},
        "rankable": True,
        "golden": {
            "count": len(OUTPUTS),
            "inputs_sha256": hashlib.sha256(b"inputs").hexdigest(),
            "outputs": list(OUTPUTS),
        },
        "tools": {"tensorflow": "2.21.0"},
    }


def mac(key: bytes, text: str) -> bytes:
    """HMAC-SHA256."""
    return hmac.digest(key, text.encode(), "sha256")


def xor(left: bytes, right: bytes) -> bytes:
    """Seals and opens a key."""
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
