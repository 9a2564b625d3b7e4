"""What a server counts of itself: the few numbers of its /metrics that say how loaded it is."""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import httpx

from optigpu.backends.endpoint.pages import page_of
from optigpu.vocabulary import Frozen

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)")
_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "running": (
            "vllm:num_requests_running",
            "sglang:num_running_reqs",
            "llamacpp:requests_processing",
            "tgi_batch_current_size",
        ),
        "waiting": (
            "vllm:num_requests_waiting",
            "sglang:num_queue_reqs",
            "llamacpp:requests_deferred",
            "tgi_queue_size",
        ),
        "cache_usage": (
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "sglang:token_usage",
            "llamacpp:kv_cache_usage_ratio",
        ),
        "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_reqs"),
    }
)
"""The names that servers have for each number."""


class ServerMetrics(Frozen):
    """A server's own counts at one moment, summed over its models; null where it does not say.

    `running` and `waiting` are requests, `cache_usage` the share of the key-value cache in use, `preemptions` how often
    a request lost its place in that cache since the server began.
    """

    running: float | None = None
    waiting: float | None = None
    cache_usage: float | None = None
    preemptions: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return all(
            value is None for value in (self.running, self.waiting, self.cache_usage, self.preemptions)
        )


async def server_metrics(http: httpx.AsyncClient, origin: str) -> ServerMetrics | None:
    """The counts of the server's /metrics, in Prometheus's text form; None where it has none that are known here."""
    page = await page_of(http, f"{origin}/metrics")
    if page is None:
        return None
    found = metrics_in(page)
    return None if found.is_empty else found


def metrics_in(text: str) -> ServerMetrics:
    """The counts in such a text."""
    sums: dict[str, float] = {}
    for name, value in _samples(text):
        sums[name] = sums.get(name, 0.0) + value
    known = {
        field: next((sums[name] for name in names if name in sums), None) for field, names in _NAMES.items()
    }
    return ServerMetrics(**known)


def _samples(text: str) -> Iterator[tuple[str, float]]:
    """Each sample that is a finite number."""
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if abs(value) < float("inf"):
            yield match[1], value
