"""The service's side of the device API, in memory, as an Http of the port: what it accepts and what it refuses.

`faults` are met by the requests to come, one each: None, a text (no answer came: HttpError), LOST and a text (the
service did it, and the answer was lost), or an answer (status, headers, body).
"""

import json

from esp32_agent.core import keys
from esp32_agent.port.base import Http, HttpError

LOST = "lost: "
INVITE = "ABCD-EFGH-JKMN-PQRS"
DEVICE = "0197a1b2-0000-7000-8000-000000000001"
JSON = {"content-type": "application/json"}
PROBLEM = {"content-type": "application/problem+json"}
PORTAL = (
    200,
    {"content-type": "text/html; charset=utf-8"},
    b"<html><body>Please accept our terms.</body></html>",
)
LOGIN = (302, {"location": "http://portal.example/login"}, b"")


class Service(Http):
    def __init__(self, clock):
        self.clock = clock
        self.faults = []
        self.keys = {}  # key id -> key
        self.claims = {}  # proof -> the claim's answer
        self.reports = {}  # (boot id, sequence) -> SHA-256 of the report's bytes
        self.stored = []  # of each report that was stored: run id, ticks_us
        self.last = b""  # the bytes of the last one
        self.runs = []
        self.duplicates = 0
        self.beats = 0
        self.refused = []  # why signatures were refused
        self.rotate = False
        self.rotations = {}  # nonce -> answer
        self.requests = 0
        self.uploads = 0  # messages that were tried, answered or not
        self.is_down = False
        self.sequences = {}  # boot id -> the last request's sequence
        self.seen = []  # (path, body) of the last requests that arrived
        self.last_device = None
        self.poison = None  # text in a report that is refused with 422
        self.largest = 65536

    def request(self, method, path, headers, body, timeout_s):
        self.uploads += 1 if path.endswith("/measurements") else 0
        if self.is_down:
            raise HttpError("connection refused")
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, tuple):
            return fault
        if isinstance(fault, str) and not fault.startswith(LOST):
            raise HttpError(fault)
        assert headers["Content-Type"] == "application/json"
        assert timeout_s > 0
        self.requests += 1
        self.seen = self.seen[-1:]
        self.seen.append((path, body))
        answer = self._answer(method, path, headers, body)
        if fault:
            raise HttpError(fault)
        return answer

    def _answer(self, method, path, headers, body):
        if len(body) > self.largest:
            return self._problem(413, "The body is too large.")
        if path == "/v1/devices/claim":
            return self._claim(json.loads(body))
        why = self._why_not(method, path, headers.get("Authorization", ""), body)
        if why == "time":
            return self._problem(
                401, "The signature is not accepted.", {"server_time_us": self.clock.true_us()}
            )
        if why:
            self.refused.append(why)
            return self._problem(401, "The signature is not accepted.")
        place = path[len("/v1/devices/" + DEVICE) :]
        if place == "/runs":
            self.runs.append(f"0197a1b2-0000-7000-8000-{len(self.runs) + 16:012x}")
            return self._ok(201, {"run_id": self.runs[-1], "server_time_us": self.clock.true_us()})
        if place == "/key":
            return self._key(json.loads(body))
        return self._measurements(json.loads(body), body)

    def _claim(self, claim):
        code = keys.claim_code(INVITE[5:])
        proof = keys.proof(code, claim["nonce"], claim["sealed_key"], claim["board"], claim["firmware"])
        if claim["invite"] != INVITE[:4] or claim["proof"] != proof:
            return self._problem(403, "The claim is refused.")
        if proof not in self.claims:
            if self.claims:
                return self._problem(403, "The claim is refused.")
            key_id = DEVICE + ".1"
            sealed = bytes.fromhex(claim["sealed_key"])
            self.keys[key_id] = bytes.fromhex(keys.seal(sealed, code, claim["nonce"]))
            self.claims[proof] = {
                "device_id": DEVICE,
                "key_id": key_id,
                "server_time_us": self.clock.true_us(),
            }
            return self._ok(201, self.claims[proof])
        return self._ok(200, self.claims[proof])

    def _why_not(self, method, path, header, body):
        scheme, _, rest = header.partition(" ")
        pairs = [pair.split("=") for pair in rest.split(",")] if rest else []
        fields = dict(pairs)
        key = self.keys.get(fields.get("key"))
        if scheme != "OptiGPU1" or key is None:
            return "unknown key"
        stamp = keys.Stamp(
            fields["key"], int(fields["time"]), fields["boot"], int(fields["seq"]), fields["fw"]
        )
        if keys.authorization(key, method, path, stamp, body) != header:
            return "signature"
        if stamp.time_us >= 1577836800000000 and abs(stamp.time_us - self.clock.true_us()) > 300000000:
            return "time"
        if stamp.sequence <= self.sequences.get(stamp.boot_id, 0):
            return "sequence"
        self.sequences[stamp.boot_id] = stamp.sequence
        for key_id in list(self.keys):
            if key_id < fields["key"]:
                del self.keys[key_id]  # the new key is used: the old one ends
        return ""

    def _key(self, document):
        nonce = document["nonce"]
        if nonce not in self.rotations:
            newest = sorted(self.keys)[-1]
            key_id = f"{DEVICE}.{int(newest[-1]) + 1}"
            sealed = bytes.fromhex(document["sealed_key"])
            self.keys[key_id] = bytes.fromhex(keys.seal_rotation(sealed, self.keys[newest], nonce))
            self.rotations[nonce] = {"key_id": key_id}
            self.rotate = False
        return self._ok(200, self.rotations[nonce])

    def _measurements(self, message, body):
        self.last_device = message["device"]
        self.beats += 0 if message["reports"] else 1
        for place, entry in enumerate(message["reports"]):
            if self.poison and entry["report"]["error"] == self.poison:
                errors = [{"field": f"reports.{place}.report.error", "message": "is poison"}]
                return self._problem(422, "A report is malformed.", {"errors": errors})
        answers = [self._store(entry, body) for entry in message["reports"]]
        return self._ok(
            200, {"server_time_us": self.clock.true_us(), "rotate": self.rotate, "reports": answers}
        )

    def _store(self, entry, body):
        report = entry["report"]
        identity = (report["boot_id"], report["sequence"])
        raw = _raw(body, identity)
        digest = keys.sha256_hex(raw)
        is_known = identity in self.reports
        state = "accepted"
        if is_known and self.reports[identity] != digest:
            state = "conflict"
        elif is_known:
            self.duplicates += 1
        else:
            self.reports[identity] = digest
            self.stored.append((report["run_id"], report["ticks_us"]))
            self.last = raw
        return {"boot_id": identity[0], "sequence": identity[1], "state": state, "duplicate": is_known}

    def _ok(self, status, document):
        return status, JSON, json.dumps(document).encode()

    def _problem(self, status, detail, more=None):
        document = {"title": "Problem", "status": status, "detail": detail}
        document.update(more or {})
        return status, PROBLEM, json.dumps(document).encode()


def _raw(body, identity):
    """The bytes of a report within the message, up to the brace that ends it and its entry."""
    start = body.find(('{"schema":1,"boot_id":"' + identity[0] + f'","sequence":{identity[1]},').encode())
    assert start > 0
    end = body.find(b'"error":', start)
    return body[start : body.find(b"}}", end) + 1]
