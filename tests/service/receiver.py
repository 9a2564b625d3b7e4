"""A real HTTP server on loopback that keeps what it is sent, a certificate for one that speaks https, and a TCP door in
front of a server: shutting it is how a test takes a database or a broker away."""

import contextlib
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import SplitResult, urlsplit


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Answers with the statuses of `answers` in turn, then with 200; a redirect leads to `location`."""

    port: int = 0
    answers: list[int] = field(default_factory=list)
    location: str = ""
    received: list[Received] = field(default_factory=list)

    def url(self, host: str = "127.0.0.1", scheme: str = "http") -> str:
        """Its address under a name."""
        return f"{scheme}://{host}:{self.port}/hook"


@contextmanager
def receiving(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """A receiver for as long as the block lasts; with a context it speaks https."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.received.append(Received(self.path, headers, body))
            self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
            if receiver.location:
                self.send_header("Location", receiver.location)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def own_certificate(name: str, folder: Path) -> tuple[Path, Path]:
    """The files of a certificate for a name, which is its own authority, and of its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    made += ["-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    return certificate, key


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
