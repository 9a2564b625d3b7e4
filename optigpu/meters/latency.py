"""latency: warm-up until requests agree, and rounds of timed requests."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from optigpu.documents.rounds import LoadRun
from optigpu.documents.selftest import Comparison
from optigpu.meters.base import MeterContext
from optigpu.workloads.base import LoadRequest, Request

WARMUP_AGREEMENT = 0.05
"""Requests agree when the slowest of the last ones is within 5% of the fastest."""
WARMUP_WINDOW = 3
"""How many must agree."""
WARMUP_SECONDS = 5.0
"""Warm-up ends after so long past the first request, so that a slow variant does not warm up for minutes."""
WARMUP_REQUESTS = 30
LONG_S, PARTS = 2.0, 4
"""A request that takes so long is judged by its own steps, in so many parts of equally many, the first one left out."""
SELF_TEST_REQUESTS = 10


@dataclass(frozen=True)
class WarmUp:
    """Seconds of every request before the first timed one, and whether the last of them agreed."""

    durations_s: tuple[float, ...]
    steady: bool

    @property
    def request_s(self) -> float:
        """A steady request: the median of the last ones, the first of all left out where there are others."""
        return median_low(self._last)

    @property
    def beyond_steady_s(self) -> float:
        """The extra time of the requests before those, compared with a steady one: compilation, if there was any."""
        before = self.durations_s[: -len(self._last)]
        return sum(max(0.0, duration - self.request_s) for duration in before)

    @property
    def _last(self) -> tuple[float, ...]:
        return self.durations_s[1:][-WARMUP_WINDOW:] or self.durations_s


def warm_up(
    request: Request,
    first_s: Sequence[float],
    since: float | None = None,
    show: Callable[[Mapping[str, float]], None] = lambda _: None,
) -> WarmUp:
    """Repeats the request until the last ones agree, or the steps of a long one, or to the cap: two that agree are then
    enough. `first_s` is what those before took, `since` when the first of them ended (now by default); `show` gets each
    request's samples."""
    durations, started = list(first_s), time.perf_counter() if since is None else since
    while not (_agree(durations, WARMUP_WINDOW) or (durations[-1] >= LONG_S and _is_even(request))):
        spent = time.perf_counter() - started
        if len(durations) > 1 and (spent > WARMUP_SECONDS or len(durations) >= WARMUP_REQUESTS):
            break
        before = time.perf_counter()
        samples = request.run()
        durations.append(time.perf_counter() - before)
        show(samples)
    return WarmUp(tuple(durations), _agree(durations, min(WARMUP_WINDOW, len(durations))))


@dataclass(frozen=True)
class TimedRequests:
    """The samples of a round, one number for each request and metric, and each request's seconds; `loads` are what
    became of the queries of each that is a run of a load."""

    samples: dict[str, tuple[float, ...]]
    request_s: tuple[float, ...]
    loads: tuple[LoadRun, ...] = ()


def run_round(
    request: Request, seconds: float, min_requests: int = 1, max_requests: int | None = None
) -> TimedRequests:
    """At least `min_requests`, then until `seconds` are over. The garbage collector rests within a round, since its
    pauses belong to no request."""
    requests: list[Mapping[str, float]] = []
    loads: list[LoadRun] = []
    gc.collect()
    gc.disable()
    try:
        marks = [time.perf_counter()]
        ends = marks[0] + seconds
        while len(requests) < min_requests or (
            marks[-1] < ends and (max_requests is None or len(requests) < max_requests)
        ):
            requests.append(request.run())
            marks.append(time.perf_counter())
            if isinstance(request, LoadRequest):
                loads.append(request.loaded())
    finally:
        gc.enable()
    request_s = tuple(after - before for before, after in pairwise(marks))
    return TimedRequests(gathered(requests), request_s, tuple(loads))


def gathered(requests: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """The samples of each metric: one number for each request, in their order."""
    names = requests[0] if requests else ()
    return {name: tuple(request[name] for request in requests) for name in names}


def _is_even(request: Request) -> bool:
    """Whether the steps of the last request took equally long from its first quarter on."""
    steps_s = request.described().get("token_s", ())
    size = len(steps_s) // PARTS
    parts = [sum(steps_s[part * size : (part + 1) * size]) for part in range(1, PARTS)]
    return size >= WARMUP_WINDOW and _agree(parts, len(parts))


def _agree(durations: Sequence[float], window: int) -> bool:
    last = durations[-window:]
    return len(last) == window and max(last) <= min(last) * (1 + WARMUP_AGREEMENT)


def self_test(context: MeterContext) -> Comparison:
    """A request's own clock, on CUDA the device's events, beside the host's around the call; the closest of several
    counts, since around each there is more than the request."""
    errors = []
    for _ in range(SELF_TEST_REQUESTS):
        began_s = time.perf_counter()
        inner_s = context.request.run()["latency_s"]
        outer_s = time.perf_counter() - began_s
        errors.append(abs(outer_s - inner_s) / outer_s)
    return Comparison(min(errors), 0.5, "the time by the host's clock")
