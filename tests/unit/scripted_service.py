"""A service with scripted answers on a real socket, for answers that a real service gives rarely."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Call:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Answer:
    """`cut` closes the connection in the middle of the body."""

    status: int = 200
    body: Any = field(default_factory=dict)
    media_type: str = "application/json"
    cut: bool = False


@contextmanager
def scripted_service(answer: Callable[[Call], Answer]) -> Iterator[tuple[str, list[Call]]]:
    """Yields the address, and the calls that have come in so far."""
    calls: list[Call] = []

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            headers = {name.lower(): value for name, value in self.headers.items()}
            calls.append(Call(self.command, self.path, headers, body))
            self.send(answer(calls[-1]))

        do_GET = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815 - the names are the library's

        def send(self, answered: Answer) -> None:
            body = answered.body if isinstance(answered.body, str) else json.dumps(answered.body)
            self.send_response(answered.status)
            self.send_header("Content-Type", answered.media_type)
            self.send_header("Content-Length", str(len(body.encode()) + answered.cut))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode())
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", calls
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
