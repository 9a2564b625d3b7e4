"""A TCP or TLS connection of MicroPython. Its socket never blocks: a server that trickles bytes cannot hold it."""

import binascii
import errno
import select
import socket
import time

from esp32_agent.port.base import HttpError
from esp32_agent.port.http import Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PIECE_BYTES = 2048
BEGIN = b"-----BEGIN CERTIFICATE-----"
END = b"-----END CERTIFICATE-----"


class SocketWire(Wire):
    """With a TLS `context` the server must prove that it is `host`."""

    def __init__(self, host: str, port: int, context: "Any", timeout_s: int) -> None:
        self._host = host
        self._socket: Any = None
        self._poller = select.poll()
        self.limit(timeout_s)
        try:
            self._connect(host, port, context)
        except (OSError, ValueError) as error:
            self.close()
            raise self._failure(error) from None
        except HttpError:
            self.close()
            raise

    def _connect(self, host: str, port: int, context: "Any") -> None:
        address = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)[0]
        plain = socket.socket(address[0], address[1], address[2])
        self._socket = plain
        plain.setblocking(False)
        try:
            plain.connect(address[-1])
        except OSError as error:
            if error.errno != errno.EINPROGRESS:
                raise
        self._poller.register(plain, select.POLLOUT)
        self._wait()
        if context is not None:
            self._poller.unregister(plain)
            self._socket = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
            self._socket.setblocking(False)
            self._poller.register(self._socket, select.POLLOUT)

    def limit(self, timeout_s: int) -> None:
        self._deadline = time.ticks_add(time.ticks_ms(), timeout_s * 1000)

    def send(self, data: bytes) -> None:
        """All of it; the TLS handshake happens within the first one."""
        view = memoryview(data)
        done = 0
        while done < len(data):
            try:
                count = self._socket.write(view[done : done + PIECE_BYTES])
            except (OSError, ValueError) as error:
                raise self._failure(error) from None
            if count:
                done += count
            else:
                self._wait_for(select.POLLOUT)

    def receive(self, count: int) -> bytes:
        while True:
            try:
                data = self._socket.read(count)
            except (OSError, ValueError) as error:
                raise self._failure(error) from None
            if data is not None:
                return data
            self._wait_for(select.POLLIN)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _wait_for(self, event: int) -> None:
        self._poller.modify(self._socket, event)
        self._wait()

    def _wait(self) -> None:
        left = time.ticks_diff(self._deadline, time.ticks_ms())
        if left <= 0 or not self._poller.poll(left):
            raise HttpError(f"{self._host} did not answer in time.")

    def _failure(self, error: Exception) -> HttpError:
        """mbedTLS says what is wrong with a certificate in a ValueError of several lines."""
        reason = str(error).strip().replace("\n", ", ")
        return HttpError(f"The connection to {self._host} failed: {reason}")


def tls_context(authority: str | None) -> "Any":
    """Trusts the certificates of a PEM or DER file and no others: MicroPython brings none of its own.

    Raises OSError, or ValueError for a file without certificates.
    """
    if authority is None:
        raise ValueError("an https server needs the PEM file of the authority that signed its certificate")
    import tls

    context = tls.SSLContext(tls.PROTOCOL_TLS_CLIENT)
    context.verify_mode = tls.CERT_REQUIRED
    with open(authority, "rb") as file:
        for certificate in certificates(file.read()):
            context.load_verify_locations(certificate)
    return context


def certificates(pem: bytes) -> list[bytes]:
    """The DER bytes of each certificate: not every build of mbedTLS reads PEM."""
    if BEGIN not in pem:
        return [pem]
    found = []
    for part in pem.split(BEGIN)[1:]:
        encoded = part.split(END)[0]
        found.append(binascii.a2b_base64(b"".join(encoded.split())))
    return found
