"""The service on a real socket, in this process: uvicorn in a thread, a real database behind it. And what the worker's
tests measure and with what: small jobs, a migrated database, a worker context."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import structlog
import uvicorn

import migrations
from api.app import create_app
from api.settings import ServiceSettings
from optigpu.documents.result import Attribution, Result, Samples
from optigpu.documents.views import JobView
from optigpu.job.spec import JobSpec
from optigpu.store import jobs, leases, outcomes, queue, workers
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.vocabulary import JobState, new_id
from tests.engine.forked import forked
from tests.service.records import a_plan, a_worker, an_outcome
from worker.context import WorkerContext, WorkerSettings
from worker.execute import execute_next

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


QUICK = {"replicates": 1, "min_seconds": 0.05, "max_seconds": 1.0, "rel_ci": 1.0, "meters": ("latency",)}
"""Other meters are read in test_embedded.py and in the tests of the engine."""
AT_ONCE = {"wait_for_quiet_s": 0}
ENDLESS = {"replicates": 1, "min_seconds": 600.0, "max_seconds": 600.0}


def matmul(
    *, sizes: tuple[int, ...] = (64,), dtypes: tuple[str, ...] = ("float32",), **fields: Any
) -> JobSpec:
    """A job of matrix products that takes seconds; with `measure=ENDLESS`, one that a test must end."""
    workload = {"kind": "matmul", "sizes": sizes, "dtypes": dtypes}
    return JobSpec.model_validate({"workload": workload, "measure": QUICK, "limits": AT_ONCE} | fields)


def tiny_ladder() -> JobSpec:
    """Baseline and bf16 on the smallest model."""
    workload = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4, "batch_size": 1}
    fields = {"model": "preset:tiny-llama-test", "stack": [{"name": "bf16"}], "plan": "ladder"}
    return JobSpec.model_validate({"workload": workload, "measure": QUICK, "limits": AT_ONCE} | fields)


def hopeless() -> JobSpec:
    """A trained model whose stack leaves it no quality, so that its result cannot be ranked."""
    workload = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4, "batch_size": 1}
    quality = {"meters": ("latency", "quality"), "quality": {"tokens": 32}}
    fields = {"model": "bundled:tiny", "stack": [{"name": "magnitude_pruning", "sparsity": 0.95}]}
    limits = AT_ONCE | {"min_top1": 0.99}
    return JobSpec.model_validate(
        {"workload": workload, "measure": QUICK | quality, "limits": limits} | fields
    )


@contextmanager
def migrated(url: str) -> Iterator[Database]:
    """The database with today's tables."""
    migrations.upgrade(url)
    database = Database(url)
    try:
        yield database
    finally:
        database.close()


def worker_context(database: Database, **settings: Any) -> WorkerContext:
    """A CPU worker within the test's own process."""
    return WorkerContext(info=a_worker(new_id()), database=database, settings=WorkerSettings(**settings))


def submit(database: Database, spec: JobSpec) -> str:
    """Queues a job and returns its id."""
    with database.write() as session:
        return jobs.submit(session, spec).job.id


def look(database: Database, job_id: str) -> JobView:
    """The job as it is now."""
    with database.read() as session:
        return jobs.get(session, job_id)


@contextmanager
def working(context: WorkerContext) -> Iterator[None]:
    """The worker takes one job in a thread; at the end of the block it is asked to stop, unless it has ended."""
    thread = threading.Thread(target=execute_next, args=(context,))
    thread.start()
    try:
        yield
    finally:
        context.stopping.ask()
        thread.join()


def measuring_processes(parent: psutil.Process | None = None) -> list[psutil.Process]:
    """The measuring processes of this process, or of `parent`."""
    found = []
    for process in (parent or psutil.Process()).children(recursive=True):
        with suppress(psutil.Error):
            if process.pid in forked() or "optigpu.child.replicate" in process.cmdline():
                found.append(process)
    return found
