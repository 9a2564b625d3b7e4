"""The network of a simulated device: one connection that stays open, its faults, and what went over it."""

import http.client
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from esp32_agent.port.base import Http, HttpError
from esp32_agent.port.simulated.faults import Faults, Reboot
from esp32_agent.port.simulated.machine import SimulatedClock, SimulatedStorage

ANSWER_BYTES = 16_384

Seen = Callable[[str, bytes, int, bytes, int], None]
"""Told of each answer that arrived: path, body, status, the answer's body, microseconds."""


class SimulatedHttp(Http):
    """Real requests to a service. Raises HttpError where the connection fails, or a fault says that it does."""

    def __init__(
        self, url: str, clock: SimulatedClock, storage: SimulatedStorage, faults: Faults, seen: Seen
    ) -> None:
        address = urlsplit(url)
        secure = address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(address.hostname or "", address.port)
        self._prefix = address.path.rstrip("/")
        self._clock, self._storage, self._faults, self._seen = clock, storage, faults, seen

    def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: int
    ) -> tuple[int, dict[str, str], bytes]:
        self._clock.settle()
        cut = self._cut() if self._faults.strikes("reboot") else ""
        if cut == "before":
            raise Reboot
        if self._faults.strikes("upload_reset"):
            self._break_off(method, path, headers, body, timeout_s)
            raise HttpError("The connection was reset in the middle of the upload.")
        begun = time.monotonic()
        status, answered, data = self._exchange(method, path, headers, body, timeout_s)
        if cut == "after":
            raise Reboot
        if self._faults.strikes("lost_answer"):
            self.close()
            raise HttpError("The answer was lost.")
        self._seen(path, body, status, data, int((time.monotonic() - begun) * 1e6))
        return status, answered, data

    def close(self) -> None:
        """Closes the connection; the next request opens another."""
        self._connection.close()

    def _cut(self) -> str:
        """When the power is cut: before the request, after it, or while the next report is stored."""
        when = self._faults.one_of("before", "after", "storing")
        self._storage.is_cut = when == "storing"
        return when

    def _exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: int
    ) -> tuple[int, dict[str, str], bytes]:
        try:
            self._open(timeout_s)
            self._connection.request(method, self._prefix + path, body, headers)
            answer = self._connection.getresponse()
            data = answer.read(ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise HttpError(f"{type(error).__name__}: {error}") from None
        if len(data) > ANSWER_BYTES:
            self.close()
            raise HttpError("The answer is too large.")
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, data

    def _break_off(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: int
    ) -> None:
        """Sends half of the body and closes the connection."""
        try:
            self._open(timeout_s)
            self._connection.putrequest(method, self._prefix + path)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self._connection.putheader(name, value)
            self._connection.endheaders(body[: len(body) // 2])
        except (OSError, http.client.HTTPException):
            pass
        finally:
            self.close()

    def _open(self, timeout_s: int) -> None:
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
