"""Prometheus metrics: the requests of this process, and what the database holds.

From the database come the queue, the workers, and what has become of jobs. Workers have no port of their own; what they
have to say of themselves is in the database already.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from optigpu import __version__
from optigpu.documents.views import WorkerView
from optigpu.store import tallies
from optigpu.store.database import Database
from optigpu.store.tallies import BOUNDS_S, Figures, PhaseBucket, Tally, TallyReader
from optigpu.vocabulary import DeviceKind

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
KEPT_S = 5.0
"""How old figures may be: several scrapers, or somebody who reloads a page, read the database once."""
WORKER = ("worker", "device", "hardware")


class Metrics:
    """A registry of its own, so that two services in one process (tests) count apart."""

    def __init__(self, database: Database, lease_s: float) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "optigpu_http_requests", "Requests served", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "optigpu_http_request_seconds",
            "Time until the response began",
            ["method", "route", "status_class"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(StoredMetrics(database, lease_s))

    def served(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts one request; `route` is the template, so that identifiers make no new series."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route, f"{status // 100}xx").observe(seconds)

    def text(self) -> bytes:
        """The exposition format. Raises StoreError when the database does not answer."""
        return generate_latest(self._registry)


class _Read(NamedTuple):
    """What was read from the database, and when by the monotonic clock."""

    figures: Figures
    tally: Tally
    at_s: float


class StoredMetrics(Collector):
    """Reads the database for a scrape, unless it was read less than KEPT_S ago."""

    def __init__(self, database: Database, lease_s: float) -> None:
        self._database = database
        self._lease_s = lease_s
        self._tallies = TallyReader()
        self._latest: _Read | None = None
        self._reading = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not query a database that may not be up yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Every family. Raises StoreError when the database does not answer."""
        with self._reading:
            if self._latest is None or time.monotonic() - self._latest.at_s >= KEPT_S:
                with self._database.read() as session:
                    now, tally = tallies.read(session, self._lease_s), self._tallies.read(session)
                self._latest = _Read(now, tally, time.monotonic())
            read = self._latest
        info = GaugeMetricFamily("optigpu_info", "The version that runs", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield from _of_queue(read.figures)
        yield from _of_workers(read.figures, read.tally)
        yield from _of_jobs(read.tally)
        yield _phases(read.tally)


def _of_queue(now: Figures) -> Iterator[Metric]:
    by_state = GaugeMetricFamily("optigpu_jobs", "Jobs by state", labels=["state"])
    for state, count in now.jobs.items():
        by_state.add_metric([state], count)
    yield by_state
    depth = GaugeMetricFamily("optigpu_queue_depth", "Jobs that wait for a worker", labels=["device"])
    oldest = GaugeMetricFamily(
        "optigpu_queue_oldest_seconds", "How long the oldest queued job has waited", labels=["device"]
    )
    for device in DeviceKind:
        waiting = now.waiting.get(device)
        depth.add_metric([device], waiting.count if waiting else 0)
        oldest.add_metric([device], waiting.oldest_s if waiting else 0)
    yield depth
    yield oldest


def _of_workers(now: Figures, tally: Tally) -> Iterator[Metric]:
    alive = GaugeMetricFamily(
        "optigpu_workers_alive", "Workers with a heartbeat within their lease", labels=["device"]
    )
    for device in DeviceKind:
        alive.add_metric([device], sum(worker.alive and worker.device is device for worker in now.workers))
    yield alive
    age = GaugeMetricFamily(
        "optigpu_worker_heartbeat_age_seconds", "Time since the worker's last heartbeat", labels=WORKER
    )
    busy = GaugeMetricFamily("optigpu_worker_busy", "Whether the worker has a job", labels=WORKER)
    spent = CounterMetricFamily(
        "optigpu_worker_busy_seconds", "Time for which the worker has had a job", labels=WORKER
    )
    for worker in now.workers:
        labels = _labels(worker)
        age.add_metric(labels, max(0.0, (now.at - worker.seen_at).total_seconds()))
        busy.add_metric(labels, worker.alive and worker.job_id is not None)
        spent.add_metric(labels, tally.busy_s.get(worker.id, 0.0))
    yield age
    yield busy
    yield spent


def _labels(worker: WorkerView) -> list[str]:
    return [worker.id, worker.device, worker.hardware_class]


def _of_jobs(tally: Tally) -> Iterator[Metric]:
    attempts = CounterMetricFamily(
        "optigpu_attempts", "Attempts at jobs that have ended", labels=["device", "outcome"]
    )
    variants = CounterMetricFamily(
        "optigpu_variants", "Variants that have ended", labels=["device", "status"]
    )
    verdicts = CounterMetricFamily("optigpu_verdicts", "Results by verdict", labels=["device", "verdict"])
    for family, counts in (
        (attempts, tally.attempts),
        (variants, tally.variants),
        (verdicts, tally.verdicts),
    ):
        for (device, word), count in sorted(counts.items()):
            family.add_metric([device, word], count)
        yield family
    reasons = CounterMetricFamily(
        "optigpu_verdict_reasons", "Why results were judged invalid", labels=["reason"]
    )
    for reason, count in sorted(tally.reasons.items()):
        reasons.add_metric([reason], count)
    yield reasons


def _phases(tally: Tally) -> Metric:
    phases = HistogramMetricFamily(
        "optigpu_phase_seconds", "How long the phases of attempts took", labels=["phase", "device"]
    )
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for (phase, device), total_s in sorted(tally.phase_s.items()):
        counts = (tally.phases[PhaseBucket(phase, device, bucket)] for bucket in range(len(bounds)))
        phases.add_metric([phase, device], list(zip(bounds, accumulate(counts), strict=True)), total_s)
    return phases
