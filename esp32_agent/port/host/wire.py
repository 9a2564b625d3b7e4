"""A TCP or TLS connection of CPython."""

import socket
import ssl
import time

from esp32_agent.port.base import HttpError
from esp32_agent.port.http import Wire

SHORTEST_S = 0.001


class SocketWire(Wire):
    """With a TLS `context` the server must prove that it is `host`."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None, timeout_s: int) -> None:
        self._host = host
        self.limit(timeout_s)
        try:
            self._socket = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise self._failure(error) from None
        if context is not None:
            try:
                self._socket = context.wrap_socket(self._socket, server_hostname=host)
            except (OSError, ValueError) as error:
                self._socket.close()
                raise self._failure(error) from None

    def limit(self, timeout_s: int) -> None:
        self._deadline = time.monotonic() + timeout_s

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self._left())
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._failure(error) from None

    def receive(self, count: int) -> bytes:
        self._socket.settimeout(self._left())
        try:
            return self._socket.recv(count)
        except OSError as error:
            raise self._failure(error) from None

    def close(self) -> None:
        self._socket.close()

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), SHORTEST_S)

    def _failure(self, error: Exception) -> HttpError:
        if isinstance(error, TimeoutError):
            return HttpError(f"{self._host} did not answer in time.")
        if isinstance(error, ssl.SSLCertVerificationError):
            return HttpError(f"The certificate of {self._host} is refused: {error.verify_message}")
        return HttpError(f"The connection to {self._host} failed: {error}")


def tls_context(authority: str | None) -> ssl.SSLContext:
    """Trusts the certificates of a PEM file and no others, or those of the system with None.

    Raises OSError if the file cannot be read or holds no certificate.
    """
    return ssl.create_default_context(cafile=authority)
