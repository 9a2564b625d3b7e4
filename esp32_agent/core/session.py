"""Requests to the service: signing them, and reading answers only as far as they are the service's."""

import json

from esp32_agent.core import keys
from esp32_agent.core.keys import Identity
from esp32_agent.core.timing import Stopwatch, WallClock
from esp32_agent.port.base import HttpError, Port

_LONGEST_WAIT_S = 3600
_LONGEST_NAME = 80
_DIGITS = "0123456789"
_NAME_LETTERS = "-_." + _DIGITS + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Answer:
    """What came back. Status 0: no answer, and `reason` says why. `document` is {} unless the body is a JSON object."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes, reason: str = "") -> None:
        self.status = status
        self.document = _document(headers.get("content-type", ""), body)
        self.retry_after_s = _seconds(headers.get("retry-after", ""))
        self.reason = reason or self._reason()

    def name(self, field: str) -> str | None:
        """A string of the document that can stand in a header or a path."""
        value = self.document.get(field)
        return value if isinstance(value, str) and _all_in(value, _NAME_LETTERS, _LONGEST_NAME) else None

    def _reason(self) -> str:
        detail = self.document.get("detail")
        return f"status {self.status}" + (f": {detail[:120]}" if isinstance(detail, str) else "")


class Session:
    """The requests of this boot."""

    def __init__(self, port: Port, uptime: Stopwatch, timeout_s: int) -> None:
        self._port = port
        self._timeout_s = timeout_s
        self.clock = WallClock(port.clock, uptime)
        self.identity: Identity | None = None
        self.boot_id = ""
        self._sequence = 0
        self.begin_boot()

    def begin_boot(self) -> None:
        """A new boot id, with requests counted from 1."""
        self.boot_id = self._port.board.random_bytes(8).hex()
        self._sequence = 0

    def send(self, path: str, body: bytes, authorization: str = "") -> Answer:
        """One POST, as it is."""
        headers = {"Content-Type": "application/json"}
        if authorization:
            headers["Authorization"] = authorization
        try:
            status, answered, data = self._port.http.request("POST", path, headers, body, self._timeout_s)
        except (HttpError, OSError) as error:
            return Answer(0, {}, b"", str(error) or "no answer")
        return Answer(status, answered, data)

    def post(self, place: str, body: bytes) -> Answer:
        """A signed POST under /v1/devices/{id}; if the service refuses the time, once more with the service's time."""
        answer = self._signed(place, body)
        if answer.status == 401 and self.clock.set(answer.document.get("server_time_us")):
            answer = self._signed(place, body)
        if answer.status in (200, 201):
            self.clock.refresh(answer.document.get("server_time_us"))
        return answer

    def _signed(self, place: str, body: bytes) -> Answer:
        identity = self.identity
        if identity is None:
            return Answer(0, {}, b"", "not enrolled")
        path = f"/v1/devices/{identity.device_id}{place}"
        self._sequence += 1
        time_us, firmware = self.clock.unix_us(), self._port.board.firmware_sha256
        stamp = keys.Stamp(identity.key_id, time_us, self.boot_id, self._sequence, firmware)
        return self.send(path, body, keys.authorization(identity.key, "POST", path, stamp, body))


def _document(media_type: str, body: bytes) -> dict[str, object]:
    if "json" not in media_type.lower():
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RuntimeError, MemoryError):  # RuntimeError: nested too deeply
        return {}
    return found if isinstance(found, dict) else {}


def _seconds(text: str) -> int | None:
    """The seconds of Retry-After, an hour at the most; a date is not read."""
    return min(int(text), _LONGEST_WAIT_S) if _all_in(text, _DIGITS, 9) else None


def _all_in(text: str, letters: str, longest: int) -> bool:
    return 0 < len(text) <= longest and all(letter in letters for letter in text)
