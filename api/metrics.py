"""Prometheus metrics: the requests of this process, and what the database holds (api/stored_metrics.py)."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from api.stored_metrics import StoredMetrics
from optigpu.store.database import Database

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
