"""A server on a real socket that answers each connection as a test says, and certificates of an authority of ours."""

import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Act = Callable[["Connection"], None]


@dataclass
class Connection:
    """An accepted connection, after the TLS handshake where there is one."""

    socket: socket.socket
    received: bytes = b""

    def read_head(self) -> bytes:
        """The request up to its empty line."""
        while b"\r\n\r\n" not in self.received:
            piece = self.socket.recv(4096)
            if not piece:
                break
            self.received += piece
        return self.received.partition(b"\r\n\r\n")[0]

    def read_request(self) -> bytes:
        """The whole request; returns its body."""
        head = self.read_head().lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        body = self.received.partition(b"\r\n\r\n")[2]
        while len(body) < length:
            body += self.socket.recv(65_536)
        self.received = self.received.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + body
        return body

    def reset(self) -> None:
        """Ends with a TCP reset and not with a farewell."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@dataclass
class Server:
    """Where it listens, and the requests that it has read."""

    port: int
    seen: list[bytes] = field(default_factory=list)


def answering(raw: bytes) -> Act:
    """Reads the request, then says this and closes the connection."""

    def act(connection: Connection) -> None:
        connection.read_request()
        connection.socket.sendall(raw)

    return act


@contextmanager
def serving(act: Act, context: ssl.SSLContext | None = None) -> Iterator[Server]:
    """A server whose connections end as `act` ends; at the end of the test those that still hang are cut."""
    open_sockets: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener.getsockname()[1])

        def serve(plain: socket.socket) -> None:
            with suppress(OSError):
                own = context.wrap_socket(plain, server_side=True) if context else plain
                connection = Connection(own)
                open_sockets.append(own)
                try:
                    act(connection)
                finally:
                    server.seen.append(connection.received)
                    own.close()

        def accept() -> None:
            with suppress(OSError):
                while True:
                    plain, _ = listener.accept()
                    open_sockets.append(plain)
                    thread = threading.Thread(target=serve, args=(plain,))
                    threads.append(thread)
                    thread.start()

        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield server
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in open_sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Authority:
    """It signs certificates; `file` is what a client trusts."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "ca.pem"

    def server(self, name: str, host: str = "localhost", expired: bool = False) -> ssl.SSLContext:
        """The TLS context of a server with a certificate for `host`."""
        key, request, certificate = (self.folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        _openssl("req", "-new", *CURVE, "-keyout", str(key), "-out", str(request), "-subj", f"/CN={host}")
        extension = self.folder / f"{name}.ext"
        extension.write_text(f"subjectAltName=DNS:{host}\n")
        if expired:
            _sign_expired(self.folder, request, certificate, extension)
        else:
            signer = (
                "-CA",
                str(self.file),
                "-CAkey",
                str(self.folder / "ca.key"),
                "-CAcreateserial",
                "-days",
                "30",
            )
            names = ("-in", str(request), "-out", str(certificate), "-extfile", str(extension))
            _openssl("x509", "-req", *names, *signer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context


def make_authority(folder: Path) -> Authority:
    """A new authority in the folder."""
    if shutil.which("openssl") is None:
        pytest.fail("The tests of TLS need the program openssl: install it.", pytrace=False)
    _openssl("req", "-x509", *CURVE, "-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.pem"), "-days", "30",
             "-subj", "/CN=Tests", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    return Authority(folder)


def _sign_expired(folder: Path, request: Path, certificate: Path, extension: Path) -> None:
    """`openssl ca` alone takes the dates of a certificate in OpenSSL 3.0."""
    (folder / "index.txt").write_text("")
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=own\n[own]\ndatabase={folder}/index.txt\nnew_certs_dir={folder}\nrand_serial=yes\n"
        "default_md=sha256\npolicy=any\n[any]\ncommonName=supplied\n"
    )
    _openssl("ca", "-batch", "-notext", "-config", str(folder / "ca.cnf"), "-in", str(request),
             "-out", str(certificate), "-cert", str(folder / "ca.pem"), "-keyfile", str(folder / "ca.key"),
             "-extfile", str(extension), "-startdate", "20200101000000Z", "-enddate", "20210101000000Z")  # fmt: skip


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
