"""What the worker's tests measure and with what: small jobs, a migrated database, a worker context."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

import migrations
from optigpu.documents.views import JobView
from optigpu.job.spec import JobSpec
from optigpu.store import jobs
from optigpu.store.database import Database
from optigpu.vocabulary import new_id
from tests.engine.forked import forked
from tests.service.records import a_worker
from worker.context import WorkerContext, WorkerSettings
from worker.execute import execute_next

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
