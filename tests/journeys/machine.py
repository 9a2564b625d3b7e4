"""Where stories happen: a machine with the command `optigpu`, and a service that has a worker on it."""

import json
import threading
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optigpu.client import Client
from optigpu.documents.views import JobView
from optigpu.paths import lock_dir
from optigpu.store import workers
from optigpu.store.database import Database
from optigpu.vocabulary import DeviceKind
from tests.engine.processes import optigpu
from tests.service.serving import Served, serving
from worker.capabilities import serving as serving_device
from worker.context import WorkerContext, WorkerSettings
from worker.execute import execute_next
from worker.sweeper import Sweeper

LOOKS_EACH_S = 0.05
DONE = (0,)
MEASURED = (0, 3)
"""The exit status of a command that measured: on a busy machine nothing of it may be fit to be ranked."""
TINY = ("--model", "bundled:tiny", "--prompt-tokens", "8", "--new-tokens", "4")
BRIEF = (
    *("--device", "cpu", "--wait-for-quiet", "0", "--replicates", "1"),
    *("--min-seconds", "0.05", "--max-seconds", "0.3", "--quality-tokens", "32"),
)
"""How little is measured where figures are not looked at."""


@dataclass(frozen=True)
class Machine:
    """Somebody's machine: where the command keeps its files, and the models folder in it."""

    folder: Path

    def optigpu(self, *words: str | Path, status: Container[int] = DONE) -> str:
        """What the command prints on stdout; its exit status must be one of these."""
        ran = optigpu({}, *map(str, words))
        assert ran.returncode in status, f"{words}: {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
        assert "Traceback" not in ran.stderr
        return ran.stdout

    def refused(self, *words: str | Path, status: int) -> str:
        """The one sentence with which the command refuses."""
        ran = optigpu({}, *map(str, words))
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (status, "", 1), ran
        return ran.stderr

    def read(self, *words: str | Path, status: Container[int] = DONE) -> Any:
        """The same as JSON."""
        return json.loads(self.optigpu(*words, "--format", "json", status=status))

    def measured(self, *words: str) -> Any:
        """The run that a command which measures has kept, as its file has it."""
        self.optigpu(*words, *BRIEF, status=MEASURED)
        return json.loads(max((self.folder / "runs").glob("*.json")).read_text("utf-8"))


@dataclass(frozen=True)
class Station:
    """A service with a worker, and the machine on which both run and whose command asks it."""

    machine: Machine
    served: Served
    database_url: str

    @property
    def url(self) -> str:
        return self.served.url

    def optigpu(self, *words: str | Path, status: Container[int] = DONE) -> str:
        """What the command prints of this service."""
        return self.machine.optigpu(*words, "--url", self.url, status=status)

    def read(self, *words: str | Path) -> Any:
        """The same as JSON."""
        return self.machine.read(*words, "--url", self.url)

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of a call."""
        answer = self.served.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def finished(self, job: dict[str, Any]) -> JobView:
        """Posts a job and waits for its end."""
        with Client(self.url) as client:
            return client.wait(client.submit(job).id)

    def rows(self, **query: Any) -> dict[str, dict[str, Any]]:
        """The leaderboard's rows by their labels; those of a busy machine as well."""
        boards = self.get("/v1/leaderboard", include_invalid=True, **query)["boards"]
        return {row["label"]: row for board in boards for row in board["rows"]}


@contextmanager
def a_station(machine: Machine, database_url: str, **settings: Any) -> Iterator[Station]:
    """A service on this database, and a worker that looks into the same one."""
    with serving(database_url, **settings) as served, _working(database_url):
        yield Station(machine, served, database_url)


@contextmanager
def _working(database_url: str) -> Iterator[None]:
    """The worker's own loop in a thread, with the capabilities of this machine."""
    with (
        serving_device(DeviceKind.CPU, lock_dir()) as info,
        closing(Database(database_url)) as database,
    ):
        context = WorkerContext(info=info, database=database, settings=WorkerSettings())
        context.write(lambda session: workers.register(session, info))

        def work() -> None:
            with Sweeper(context):
                while not context.stopping.asked:
                    if not execute_next(context):
                        context.stopping.wait(LOOKS_EACH_S)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            context.stopping.ask()
            thread.join()
