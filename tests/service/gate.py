"""A TCP door in front of a server: shutting it is how a test takes a database or a broker away."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit


class Gate:
    """Forwards a port of its own on 127.0.0.1 to a server. It begins shut.

    Shut, it drops every connection and refuses new ones.
    """

    def __init__(self, url: str, default_port: int) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or default_port)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._address = ("127.0.0.1", probe.getsockname()[1])
        self.url = _through(parts, self._address[1])
        self._server: _Forwarder | None = None

    def open(self) -> None:
        """Lets connections through."""
        self._server = _Forwarder(self._address, self._target)
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def shut(self) -> None:
        """Drops every connection and refuses new ones; harmless when shut already."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.drop_all()
            self._server = None


@contextmanager
def gate_to(url: str, default_port: int) -> Iterator[Gate]:
    """A gate that is shut for good at the end."""
    gate = Gate(url, default_port)
    try:
        yield gate
    finally:
        gate.shut()


def _through(parts: SplitResult, port: int) -> str:
    user, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}{at}127.0.0.1:{port}").geturl()


class _Forwarder(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], target: tuple[str, int]) -> None:
        super().__init__(address, _Forward)
        self.target = target
        self.ends: set[socket.socket] = set()

    def drop_all(self) -> None:
        for end in tuple(self.ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class _Forward(socketserver.BaseRequestHandler):
    server: _Forwarder

    def handle(self) -> None:
        try:
            upstream = socket.create_connection(self.server.target)
        except OSError:
            return  # the server is away; the connection is closed
        with upstream:
            ends = {self.request, upstream}
            self.server.ends |= ends
            answers = threading.Thread(target=_pump, args=(upstream, self.request), daemon=True)
            answers.start()
            _pump(self.request, upstream)
            answers.join()
            self.server.ends -= ends


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copies bytes until either end is closed, then closes the other."""
    with contextlib.suppress(OSError):
        while received := source.recv(65536):
            sink.sendall(received)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
