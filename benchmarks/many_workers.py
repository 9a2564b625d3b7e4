"""`python -m benchmarks.many_workers`: how many workers one PostgreSQL carries.

For each number of workers it makes a database of its own and does what so many workers do, through the functions of the
store that workers call: each holds a job whose heartbeat it writes once a second with new progress, ends it after
half a minute and claims the next one, and every five seconds says that it lives and takes lost jobs back. The workers
are entries of a timetable that some threads of two processes share over a few connections, not processes: what is
measured is the database. A write counts from the moment at which it is due, so that a database that falls behind shows.

Goal: 2,000 workers, with 99 of 100 heartbeats within a second of their moment, a thirtieth of a lease. Exit status 0 if
it is met, else 1.
"""

import argparse
import heapq
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.document import write
from benchmarks.own_postgresql import SERVER, backends_s, own_database
from optigpu.documents.views import ProgressView
from optigpu.job.spec import JobSpec
from optigpu.report.formats import Grid, columns, console, terminal
from optigpu.store import jobs, leases, outcomes, workers
from optigpu.store.database import Database, Session
from optigpu.store.leases import Lease
from optigpu.store.workers import LEASE_S, WorkerInfo
from optigpu.vocabulary import DeviceKind, JobState, OptiGPUError

WORKERS = (100, 250, 500, 2000)
MOST_WORKERS, GOAL_S = 2000, 1.0
BEAT_S, SWEEP_S, JOB_S = 1.0, 5.0, 30.0
"""A worker's heartbeat and sweep, and how long each job takes here."""
PROCESSES, THREADS = 2, 3
SECONDS, LATE = 8.0, 2.0
"""How long workers write, and how many times as long is waited for writes that are late."""
ENROLLED_WITHIN_S = 600.0
"""The lease until the first heartbeat, since thousands of workers claim their first jobs one after the other."""
OWNERS = 8
"""Keys whose jobs take turns."""
JOB = {"workload": {"kind": "matmul", "sizes": [64]}}
BATCH = 200
"""Jobs that are entered in one transaction."""


@dataclass
class Held:
    """A simulated worker and the lease that it holds."""

    worker: WorkerInfo
    lease: Lease | None = None
    beats: int = 0


@dataclass
class Waits:
    """Seconds from the moment at which each write was due until it was committed, by kind."""

    heartbeat: list[float] = field(default_factory=list)
    claim: list[float] = field(default_factory=list)
    sweep: list[float] = field(default_factory=list)
    # Writes that were not done when all had to end; their seconds are those until then.
    never: int = 0
    # How long the timetable took, whose last writes may come late.
    took_s: float = 0.0
    # CPU seconds of the processes that simulate workers, and of those of PostgreSQL that serve them; None: not seen.
    client_s: float = 0.0
    postgresql_s: float | None = 0.0

    def add(self, others: "Waits") -> None:
        """Those of a thread or a process beside this one."""
        self.heartbeat += others.heartbeat
        self.claim += others.claim
        self.sweep += others.sweep
        self.never += others.never
        self.took_s = max(self.took_s, others.took_s)
        self.client_s += others.client_s
        seen = self.postgresql_s is not None and others.postgresql_s is not None
        self.postgresql_s = (self.postgresql_s or 0.0) + (others.postgresql_s or 0.0) if seen else None


@dataclass(frozen=True)
class Row:
    """What so many workers came to. Cores are those in use, in the mean; those of PostgreSQL null where unseen."""

    workers: int
    seconds: float
    # The share of all writes that were done when all had to end.
    written: float
    heartbeats_per_s: float
    heartbeat_p50_s: float
    heartbeat_p99_s: float
    claims_per_s: float
    claim_p50_s: float | None
    claim_p99_s: float | None
    sweeps_per_s: float
    postgresql_cores: float | None
    client_cores: float


def main() -> int:
    """Measures, prints the table, and says whether the goal is met."""
    options = _options()
    rows: list[Row] = []
    try:
        for count in options.workers:
            with own_database(options.server) as url:
                rows.append(_measured(url, count, options.seconds))
            if options.output:
                setup = {"processes": PROCESSES, "threads": THREADS, "job_s": JOB_S, "sweep_s": SWEEP_S}
                write(options.output, "many_workers", {**setup, "rows": [asdict(row) for row in rows]})
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    console().print(terminal(_table(rows)))
    most = [row for row in rows if row.workers == MOST_WORKERS]
    is_met = all(row.heartbeat_p99_s <= GOAL_S for row in most)
    for row in most:
        said = f"{MOST_WORKERS:,} workers: 99% of heartbeats within {1000 * row.heartbeat_p99_s:,.0f} ms"
        console().print(
            f"{'met' if is_met else 'NOT MET':7}  {said} (goal {1000 * GOAL_S:,.0f})", markup=False
        )
    return 0 if is_met else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_workers", description=__doc__)
    parser.add_argument("--server", default=SERVER, help="a PostgreSQL server on which databases may be made")
    parser.add_argument("--workers", type=_count, nargs="+", default=list(WORKERS), help="at most 2000")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each number of workers")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    return parser.parse_args()


def _count(text: str) -> int:
    count = int(text)
    if not PROCESSES * THREADS <= count <= MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"must be from {PROCESSES * THREADS} to {MOST_WORKERS}")
    return count


def _measured(url: str, count: int, seconds: float) -> Row:
    share = count // PROCESSES
    firsts = [number * share for number in range(PROCESSES)]
    _fill(url, share * PROCESSES, round(share * PROCESSES * (1.1 + seconds / JOB_S)))
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        held = list(pool.map(_enrol, [url] * PROCESSES, firsts, [share] * PROCESSES))
        begins_at = time.time() + 0.5
        running = [pool.submit(_work, url, each, begins_at, seconds) for each in held]
        found = [each.result() for each in running]
    waits = Waits()
    for one in found:
        waits.add(one)
    return _row(share * PROCESSES, seconds, waits)


def _fill(url: str, count: int, queued: int) -> None:
    """Workers that are registered, and jobs that wait."""
    spec = JobSpec.model_validate(JOB)
    with closing(Database(url)) as database:
        for first in range(0, queued, BATCH):
            with database.write() as session:
                for number in range(first, min(first + BATCH, queued)):
                    jobs.submit(session, spec, owner=f"key-{number % OWNERS}", fresh=True)
        with database.write() as session:
            for number in range(count):
                workers.register(session, _info(number))


def _info(number: int) -> WorkerInfo:
    return WorkerInfo(
        id=f"worker-{number:05d}",
        host_id=f"host-{number // 8:04d}",
        hardware_class="a simulated worker",
        device=DeviceKind.CPU,
        memory_bytes=2**34,
        backends=("torch",),
        version="0",
    )


def _enrol(url: str, first: int, count: int) -> list[Held]:
    """Workers that each have claimed a job."""
    with closing(Database(url)) as database, ThreadPoolExecutor(THREADS) as pool:
        held = [Held(_info(number)) for number in range(first, first + count)]
        list(pool.map(lambda each: _claim(database, each, ENROLLED_WITHIN_S), held))
    return held


def _claim(database: Database, held: Held, lease_s: float = LEASE_S) -> None:
    with database.write() as session:
        held.lease = leases.claim(session, held.worker, lease_s)
    if held.lease is None:
        raise OptiGPUError("The jobs were too few for so many workers, so nothing was measured.")


def _work(url: str, held: Sequence[Held], begins_at: float, seconds: float) -> Waits:
    """What the workers write, on some threads."""
    with closing(Database(url)) as database, ThreadPoolExecutor(THREADS) as pool:
        time.sleep(max(0.0, begins_at - time.time()))
        used_s, waits = time.process_time(), Waits()
        shares = [held[number::THREADS] for number in range(THREADS)]
        begun = time.monotonic()
        for found in pool.map(lambda share: _timetable(database, share, begun, seconds), shares):
            waits.add(found)
        waits.client_s, waits.postgresql_s = time.process_time() - used_s, backends_s()
        return waits


def _timetable(database: Database, held: Sequence[Held], begun: float, seconds: float) -> Waits:
    """The writes of some workers, one after the other, each at its moment or as soon as those before it are done."""
    waits, chance = Waits(), random.Random(held[0].worker.id)
    periods = {"heartbeat": BEAT_S, "claim": JOB_S, "sweep": SWEEP_S}
    does = {"heartbeat": _beat, "claim": _next_job, "sweep": _sweep}
    due = [
        (begun + chance.random() * period, kind, number)
        for number in range(len(held))
        for kind, period in periods.items()
    ]
    heapq.heapify(due)
    while due[0][0] < begun + seconds:
        at, kind, number = heapq.heappop(due)
        time.sleep(max(0.0, at - time.monotonic()))
        if time.monotonic() < begun + LATE * seconds:
            does[kind](database, held[number])
        else:
            waits.never += 1
        getattr(waits, kind).append(time.monotonic() - at)
        heapq.heappush(due, (at + periods[kind], kind, number))
    waits.took_s = max(seconds, time.monotonic() - begun)
    return waits


def _beat(database: Database, held: Held) -> None:
    held.beats += 1
    progress = ProgressView(fraction=(held.beats % 100) / 100, doing="measuring")
    with database.write() as session:
        leases.heartbeat(session, _lease(held), LEASE_S, progress)


def _next_job(database: Database, held: Held) -> None:
    """Ends the job and claims another one."""
    with database.write() as session:
        outcomes.finish(session, _lease(held), JobState.SUCCEEDED)
    _claim(database, held)


def _sweep(database: Database, held: Held) -> None:
    lease = _lease(held)

    def says_that_it_lives(session: Session) -> None:
        workers.seen(session, held.worker.id, lease.job_id)

    for work in (says_that_it_lives, leases.sweep):
        with database.write() as session:
            work(session)


def _lease(held: Held) -> Lease:
    assert held.lease is not None
    return held.lease


def _row(count: int, seconds: float, waits: Waits) -> Row:
    written = 1 - waits.never / len([*waits.heartbeat, *waits.claim, *waits.sweep])
    beats = np.percentile(waits.heartbeat, (50, 99))
    claims = np.percentile(waits.claim, (50, 99)) if waits.claim else None
    return Row(
        workers=count,
        seconds=seconds,
        written=written,
        heartbeats_per_s=written * len(waits.heartbeat) / waits.took_s,
        heartbeat_p50_s=float(beats[0]),
        heartbeat_p99_s=float(beats[1]),
        claims_per_s=written * len(waits.claim) / waits.took_s,
        claim_p50_s=None if claims is None else float(claims[0]),
        claim_p99_s=None if claims is None else float(claims[1]),
        sweeps_per_s=written * len(waits.sweep) / waits.took_s,
        postgresql_cores=None if waits.postgresql_s is None else waits.postgresql_s / waits.took_s,
        client_cores=waits.client_s / waits.took_s,
    )


def _table(rows: Sequence[Row]) -> Grid:
    shown = []
    for row in rows:
        times = (row.heartbeat_p50_s, row.heartbeat_p99_s, row.claim_p50_s, row.claim_p99_s)
        beats50, beats99, claims50, claims99 = (
            "-" if each is None else f"{1000 * each:,.1f}" for each in times
        )
        cores = "-" if row.postgresql_cores is None else f"{row.postgresql_cores:.2f}"
        shown.append(
            (
                *(f"{row.workers:,}", f"{100 * row.written:.0f}%"),
                *(f"{row.heartbeats_per_s:,.0f}", beats50, beats99),
                *(f"{row.claims_per_s:,.1f}", claims50, claims99),
                *(f"{row.sweeps_per_s:,.0f}", cores, f"{row.client_cores:.2f}"),
            )
        )
    ends = ("p50 (ms):", "p99 (ms):")
    headings = ("workers:", "written:", "heartbeats/s:", *ends, "claims/s:", *ends, "sweeps/s:")
    cores_of = ("cores, PostgreSQL:", "cores, simulation:")
    return Grid("Simulated workers on one PostgreSQL", columns(*headings, *cores_of), tuple(shown))


if __name__ == "__main__":
    sys.exit(main())
