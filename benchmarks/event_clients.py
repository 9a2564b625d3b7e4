"""`python -m benchmarks.event_clients`: what clients that follow jobs cost the service, and how soon they see an event.

`python -m api` runs on a PostgreSQL database of its own. This process holds the clients (server-sent events over plain
sockets), spread over some jobs that run, and writes events: each counts from the moment at which its transaction is
committed until a client has read it. Meanwhile another process asks for jobs.

Goal: 1,000 clients, with 99 of 100 events within 2 seconds and less than 100 kB of the service's memory for each. Exit
status 0 if it is met, else 1.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
from rich.table import Table

from benchmarks.document import write
from benchmarks.http_load import Ask, Order, Served, load
from benchmarks.own_postgresql import SERVER, Started, api_on, own_database
from optigpu.job.spec import JobSpec
from optigpu.report import console
from optigpu.store import events, jobs, leases, workers
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import DeviceKind, OptiGPUError

CLIENTS = (0, 10, 100, 1000)
MOST_CLIENTS, GOAL_S, GOAL_BYTES = 1000, 2.0, 100_000
JOBS = 10
EVENTS, EVERY_S = 10, 1.0
"""Events of each job."""
JOB = {"workload": {"kind": "matmul", "sizes": [64]}}
LEASE_S = 3600.0
CONNECTED_WITHIN_S, ARRIVED_WITHIN_S = 60.0, 30.0
RATE = 20.0
"""Other requests a second."""


@dataclass(frozen=True)
class Row:
    """What so many clients came to. Memory is the service's resident set with all connected; seconds are None without
    clients."""

    clients: int
    jobs: int
    memory_bytes: int
    bytes_each: float | None
    events: int
    missed: int
    event_p50_s: float | None
    event_p99_s: float | None
    event_max_s: float | None
    others: Served


@dataclass
class Followers:
    """Clients that follow jobs, and when each read which event: by job and sequence, of all clients."""

    read_at: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    connected: int = 0

    async def follow(self, address: str, job_id: str) -> None:
        """Reads one stream until it is cancelled."""
        host = urlsplit(address)
        reader, writer = await asyncio.open_connection(host.hostname, host.port)
        try:
            writer.write(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: {host.netloc}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise OptiGPUError("A client was refused, so nothing was measured.")
            self.connected += 1
            while line := await reader.readline():
                if line.startswith(b"id:"):
                    self.read_at.setdefault((job_id, int(line[3:])), []).append(time.monotonic())
        finally:
            writer.close()


def main() -> int:
    """Measures, prints the table, and says whether the goal is met."""
    options = _options()
    try:
        with own_database(options.server) as url:
            rows = [_measured(url, count) for count in options.clients]
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    if options.output:
        write(options.output, "event_clients", {"rows": [_plain(row) for row in rows]})
    console().print(_table(rows))
    most = [row for row in rows if row.clients == MOST_CLIENTS]
    is_met = all(_is_met(row) for row in most)
    for row in most:
        said = (
            f"{row.clients:,} clients: 99% of events within {row.event_p99_s or 0:.2f} s (goal {GOAL_S:g}), "
            f"{(row.bytes_each or 0) / 1000:.0f} kB each (goal {GOAL_BYTES / 1000:.0f}), {row.missed} missed (goal 0)"
        )
        console().print(f"{'met' if is_met else 'NOT MET':7}  {said}", markup=False)
    return 0 if is_met else 1


def _is_met(row: Row) -> bool:
    if row.event_p99_s is None or row.bytes_each is None:
        return False
    return not row.missed and row.event_p99_s <= GOAL_S and row.bytes_each < GOAL_BYTES


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.event_clients", description=__doc__)
    parser.add_argument("--server", default=SERVER, help="a PostgreSQL server on which databases may be made")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=list(CLIENTS), help="how many, one after the other"
    )
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    return parser.parse_args()


def _measured(url: str, count: int) -> Row:
    """On a service that has just started, so that memory of an earlier row is in no later one."""
    with api_on(url) as service, closing(Database(url)) as database:
        return asyncio.run(_followed(service, database, count))


async def _followed(service: Started, database: Database, count: int) -> Row:
    held = await asyncio.to_thread(_running, database)
    paths = tuple(Ask(path=f"/v1/jobs/{lease.job_id}") for lease in held)
    await asyncio.to_thread(load, Order(urls=(service.address,), asks=paths, connections=2, seconds=1.0))
    process = psutil.Process(service.pid)
    before = process.memory_info().rss
    followers = Followers()
    tasks = [
        asyncio.create_task(followers.follow(service.address, held[number % JOBS].job_id))
        for number in range(count)
    ]
    if not await _until(lambda: followers.connected == count, tasks, CONNECTED_WITHIN_S):
        raise OptiGPUError(
            f"Only {followers.connected} of {count} clients could connect, so nothing was measured."
        )
    order = Order(urls=(service.address,), asks=paths, connections=4, seconds=EVENTS * EVERY_S, rate=RATE)
    others = asyncio.create_task(asyncio.to_thread(load, order))
    committed = await _write(database, held)
    expected = EVENTS * count

    def waits() -> list[float]:
        return [moment - at for key, at in committed.items() for moment in followers.read_at.get(key, ())]

    await _until(lambda: len(waits()) >= expected, tasks, ARRIVED_WITHIN_S)
    memory, served = process.memory_info().rss, await others
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found = waits()
    times = (
        [None] * 3 if not found else [float(each) for each in (*np.percentile(found, (50, 99)), max(found))]
    )
    return Row(
        clients=count,
        jobs=JOBS,
        memory_bytes=memory,
        bytes_each=(memory - before) / count if count else None,
        events=expected,
        missed=expected - len(found),
        event_p50_s=times[0],
        event_p99_s=times[1],
        event_max_s=times[2],
        others=served,
    )


def _running(database: Database) -> list[Lease]:
    """Jobs that a worker holds for as long as this takes."""
    spec = JobSpec.model_validate(JOB)
    worker = WorkerInfo(
        id="worker-0",
        host_id="host-0",
        hardware_class="a simulated worker",
        device=DeviceKind.CPU,
        memory_bytes=2**34,
        backends=("torch",),
        version="0",
    )
    held = []
    with database.write() as session:
        workers.register(session, worker)
        for _ in range(JOBS):
            jobs.submit(session, spec, fresh=True)
    for _ in range(JOBS):
        with database.write() as session:
            lease = leases.claim(session, worker, LEASE_S)
        if lease is None:
            raise OptiGPUError("The jobs could not be claimed, so nothing was measured.")
        held.append(lease)
    return held


async def _write(database: Database, held: Sequence[Lease]) -> dict[tuple[str, int], float]:
    """Events of all jobs, some a second; the moment at which each was committed."""
    committed: dict[tuple[str, int], float] = {}

    def append(job_id: str) -> None:
        with database.write() as session:
            sequence = events.append(session, job_id, "benchmark", {"text": "x" * 100})
        committed[job_id, sequence] = time.monotonic()

    for _ in range(EVENTS):
        began = time.monotonic()
        for lease in held:
            await asyncio.to_thread(append, lease.job_id)
        await asyncio.sleep(max(0.0, began + EVERY_S - time.monotonic()))
    return committed


async def _until(happened: Callable[[], bool], tasks: Sequence[asyncio.Task[None]], within_s: float) -> bool:
    """Whether it happened in time. Raises what ended one of the clients."""
    until = time.monotonic() + within_s
    while not happened():
        ended = next((task for task in tasks if task.done()), None)
        if ended is not None:
            ended.result()
            raise OptiGPUError("The service ended a stream, so nothing was measured.")
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.05)
    return True


def _plain(row: Row) -> dict[str, object]:
    return asdict(row) | {"others": row.others.model_dump()}


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title=f"Clients that follow {JOBS} jobs, {JOBS / EVERY_S:g} events/s")
    for heading in (
        *("clients", "memory (MB)", "each (kB)", "events", "missed", "p50 (ms)", "p99 (ms)", "longest (ms)"),
        *("other requests, p50 (ms)", "p99 (ms)"),
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        times = (row.event_p50_s, row.event_p99_s, row.event_max_s, row.others.p50_s, row.others.p99_s)
        shown = ["-" if each is None else f"{1000 * each:,.0f}" for each in times]
        each = "-" if row.bytes_each is None else f"{row.bytes_each / 1000:,.1f}"
        table.add_row(
            f"{row.clients:,}",
            f"{row.memory_bytes / 1e6:,.0f}",
            each,
            f"{row.events:,}",
            f"{row.missed:,}",
            *shown,
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
