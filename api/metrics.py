"""Prometheus metrics: the requests of this process, and what the database holds at the time of the scrape."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from optigpu.store import queue, workers
from optigpu.store.database import Database
from optigpu.vocabulary import JobState

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


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
            ["method", "route"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_Stored(database, lease_s))

    def served(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts one request; `route` is the template, so that identifiers make no new series."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def text(self) -> bytes:
        """The exposition format. Raises StoreError when the database does not answer."""
        return generate_latest(self._registry)


class _Stored(Collector):
    """Reads the database anew for each scrape."""

    def __init__(self, database: Database, lease_s: float) -> None:
        self._database = database
        self._lease_s = lease_s

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not query a database that may not be up yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Jobs by state, jobs in the queue, workers that are alive."""
        with self._database.read() as session:
            counts = queue.counts(session)
            alive = sum(worker.alive for worker in workers.list_(session, lease_s=self._lease_s))
        by_state = GaugeMetricFamily("optigpu_jobs", "Jobs by state", labels=["state"])
        for state, count in counts.items():
            by_state.add_metric([state], count)
        yield by_state
        yield GaugeMetricFamily(
            "optigpu_queue_depth", "Jobs that wait for a worker", value=counts[JobState.QUEUED]
        )
        yield GaugeMetricFamily(
            "optigpu_workers_alive", "Workers with a heartbeat within their lease", value=alive
        )
