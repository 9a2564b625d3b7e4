"""The service on a real socket, in this process: uvicorn in a thread, a real database behind it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import structlog
import uvicorn

import migrations
from api.app import create_app
from api.settings import ServiceSettings
from optigpu.documents.result import Attribution, Result, Samples
from optigpu.store import leases, outcomes, queue, workers
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.vocabulary import JobState
from tests.service.records import a_plan, a_worker, an_outcome

START_WITHIN_S = 30.0
# pytest shows what the standard library's logging is given; structlog by itself would print.
structlog.configure(
    processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()],
    logger_factory=structlog.stdlib.LoggerFactory(),
)
MANY = "1000000/minute"
MATMUL = {"workload": {"kind": "matmul", "sizes": [64]}}
"""The smallest job."""


@dataclass
class Served:
    """A running service and what stands behind it."""

    url: str
    database: Database
    client: httpx.Client
    app: Any

    def submit(self, document: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
        """Posts a job that must be accepted."""
        answer = self.client.post("/v1/jobs", json=document or MATMUL, headers=headers)
        assert answer.status_code == 202, answer.text
        job: dict[str, Any] = answer.json()
        return job

    def count_jobs(self) -> int:
        """How many jobs the database holds."""
        with self.database.read() as session:
            return sum(queue.counts(session).values())

    def claim(self) -> Lease:
        """Takes the next job as a worker would."""
        worker = a_worker()
        with self.database.write() as session:
            workers.register(session, worker)
            lease = leases.claim(session, worker, lease_s=60)
        assert lease is not None
        return lease

    def finish(
        self,
        lease: Lease,
        *results: Result,
        samples: dict[str, Samples] | None = None,
        reason: str | None = None,
    ) -> None:
        """Ends the job with results that were made for the test and never measured."""
        with self.database.write() as session:
            outcomes.plan(session, lease, a_plan(*(result.variant.label for result in results)))
        for result in results:
            with self.database.write() as session:
                outcomes.save_outcome(session, lease, an_outcome(result, samples))
        with self.database.write() as session:
            attribution = Attribution(metric="tflops", rows=())
            outcomes.finish(session, lease, JobState.SUCCEEDED, reason, attribution)


@contextmanager
def serving(database_url: str, port: int = 0, **settings: Any) -> Iterator[Served]:
    """A migrated database and the service on it, without a worker; on that port, or on a free one."""
    migrations.upgrade(database_url)
    defaults: dict[str, Any] = {"database_url": database_url, "embedded_worker": False, "rate_limit": MANY}
    app = create_app(ServiceSettings(**defaults | settings))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, access_log=False))
    app.state.service.feeds.stopping = lambda: server.should_exit
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        url = f"http://127.0.0.1:{_port(server)}"
        database = Database(database_url)
        with httpx.Client(base_url=url, timeout=30) as client:
            yield Served(url, database, client, app)
        database.close()
    finally:
        server.should_exit = True
        thread.join()


def _port(server: uvicorn.Server) -> int:
    deadline = time.monotonic() + START_WITHIN_S
    while not server.started:
        assert time.monotonic() < deadline, "the service does not start"
        time.sleep(0.01)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port
