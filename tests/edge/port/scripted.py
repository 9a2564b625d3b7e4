"""A server on a real socket that answers each connection as a test says."""

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

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
