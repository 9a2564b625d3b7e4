"""A service of its own for a benchmark, and calls to it over connections that stay open."""

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.signing_device import Request
from optigpu.store.database import Database
from optigpu.vocabulary import OptiGPUError

LISTENS = "OptiGPU listens on "
ENDS_WITHIN_S, ANSWER_WITHIN_S = 60.0, 30.0
TRIES = 5
MANY = "999999999/second"


@dataclass(frozen=True)
class Answer:
    """The status, and the document."""

    status: int
    document: dict[str, object]

    @property
    def takes(self) -> int:
        """The reports (or devices, runs, keys) that this answer says were newly taken."""
        if self.status not in (200, 201):
            return 0
        reports = self.document.get("reports")
        if not isinstance(reports, list):
            return 1
        return sum(each["state"] != "conflict" and not each["duplicate"] for each in reports)


@dataclass
class Service:
    """A running service; each thread keeps a connection of its own."""

    url: str
    database: Database
    _kept: threading.local = field(default_factory=threading.local)
    _opened: list[http.client.HTTPConnection] = field(default_factory=list)

    def close(self) -> None:
        """Closes the connections of all threads."""
        for connection in self._opened:
            connection.close()
        self.database.close()

    def send(self, request: Request, method: str = "POST") -> Answer:
        """The answer; a connection that broke is made again, a few times."""
        for _ in range(TRIES):
            try:
                return self._sent(request, method)
            except (OSError, http.client.HTTPException):
                self._kept.connection = None
        raise OptiGPUError("The service does not answer any more, so nothing was found out.")

    def _sent(self, request: Request, method: str) -> Answer:
        connection = getattr(self._kept, "connection", None)
        if connection is None:
            address = urlsplit(self.url)
            connection = http.client.HTTPConnection(
                address.hostname or "", address.port, timeout=ANSWER_WITHIN_S
            )
            self._kept.connection = connection
            self._opened.append(connection)
        connection.putrequest(method, request.path)
        for name, value in (*request.headers, ("Content-Length", str(len(request.body)))):
            connection.putheader(name, value)
        connection.endheaders(request.body)
        answer = connection.getresponse()
        return Answer(answer.status, json.loads(answer.read()))


@contextmanager
def serving(folder: Path) -> Iterator[Service]:
    """A service of its own without a worker, which counts no calls."""
    url = f"sqlite:///{folder / 'optigpu.db'}"
    variables = {
        "OPTIGPU_DATABASE_URL": url,
        "OPTIGPU_DATA_DIR": str(folder),
        "OPTIGPU_EMBEDDED_WORKER": "false",
        "OPTIGPU_RATE_LIMIT": MANY,
        "OPTIGPU_DEVICE_RATE_LIMIT": MANY,
        "OPTIGPU_LOG_LEVEL": "ERROR",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPTIGPU_")}
    command = [sys.executable, "-m", "api", "--port", "0"]
    with subprocess.Popen(command, env=inherited | variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline().strip() if process.stdout else ""
            if not line.startswith(LISTENS):
                raise OptiGPUError("The service could not start, so nothing was found out.")
            with closing(Service(line.removeprefix(LISTENS), Database(url))) as service:
                yield service
        finally:
            process.terminate()
            process.wait(ENDS_WITHIN_S)
