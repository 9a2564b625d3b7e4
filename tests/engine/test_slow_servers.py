"""Loads on servers on loopback: a Poisson run computed again from its samples and from the server's own log, and a
server that stands still, which a client that waits for it hides."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.backends.endpoint.runtime import EndpointRuntime
from optigpu.documents.load import LoadRun
from optigpu.workloads.serve import Serve
from tests.engine.test_endpoint_backend import asking
from tests.servers.completions import Asked, Reply, whole

pytestmark = pytest.mark.slow
QUERIES, RATE = 60, 60.0
SERVICE_S, LIMIT_S, LATE_S = 0.01, 0.04, 0.03
"""What an answer takes beside its tokens, a limit that some queries miss, and how much later than its moment a query
may reach a busy process."""
STILL_S = 0.8


def loaded(runtime: EndpointRuntime, **workload: Any) -> LoadRun:
    """One run of a load."""
    shapes = {"queries": QUERIES, "prompt_tokens": 4, "new_tokens": 2}
    request = Serve.model_validate(shapes | workload).prepare(runtime)
    request.run()
    return request.loaded()


@dataclass
class OneByOne:
    """Answers one completion after the other, and notes how long each took."""

    services_s: list[float] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, asked: Asked, reply: Reply) -> None:
        async with self.turn:
            started = time.perf_counter()
            await asyncio.sleep(SERVICE_S)
            await whole(asked, reply)
            self.services_s.append(time.perf_counter() - started)


def test_a_poisson_run_is_what_its_samples_and_the_server_s_log_say(tmp_path: Path) -> None:
    server = OneByOne()
    with asking(tmp_path, server) as (runtime, _):
        server.services_s.clear()
        found = loaded(runtime, rates=[RATE], ttft_s=LIMIT_S)
    gaps = np.random.default_rng(0).exponential(size=QUERIES + 1)
    sent_s, latency_s, ttft_s = map(np.array, (found.sent_s, found.latency_s, found.ttft_s))
    assert sent_s == pytest.approx(np.cumsum(gaps[:-1]) * QUERIES / RATE / gaps.sum())
    free_s = 0.0
    for arrival_s, service_s, latency in zip(sent_s, server.services_s, latency_s, strict=True):
        free_s = max(arrival_s, free_s) + service_s  # Lindley's recursion
        assert free_s - arrival_s - 1e-3 <= latency <= free_s - arrival_s + LATE_S
    ends_s = sent_s + latency_s
    assert found.seconds == pytest.approx(ends_s.max(), abs=LATE_S)
    assert found.met == np.count_nonzero(ttft_s <= LIMIT_S)
    assert 0 < found.met < QUERIES
    assert found.goodput_per_s == pytest.approx(found.met / found.seconds)
    moments = np.linspace(0, found.seconds, 20_000, endpoint=False)
    waiting = [np.count_nonzero((sent_s <= moment) & (moment < sent_s + ttft_s)) for moment in moments]
    assert found.waiting == pytest.approx(np.mean(waiting), rel=0.01)
    law = found.law
    assert law.expected + law.rate * law.late_s == pytest.approx(latency_s.sum() / found.seconds)
    assert law.holds


@dataclass
class StandingStill:
    """Answers at once, but for STILL_S from the fifth completion on to nobody."""

    count: int = 0
    until_s: float = 0.0

    async def __call__(self, asked: Asked, reply: Reply) -> None:
        self.count += 1
        if self.count == 5:
            self.until_s = time.perf_counter() + STILL_S
        await asyncio.sleep(max(0.0, self.until_s - time.perf_counter()))
        await whole(asked, reply)


def test_a_server_that_stands_still_is_slow_for_all_that_came_meanwhile(tmp_path: Path) -> None:
    """Coordinated omission: a client that waits for its answer sends nothing meanwhile, and so has one slow query."""
    server = StandingStill()
    with asking(tmp_path, server) as (runtime, _):
        server.count = 0
        waiting = np.array(loaded(runtime, scenario="closed", clients=1).latency_s)
        server.count = 0
        arriving = np.array(loaded(runtime, rates=[RATE]).latency_s)
    assert max(waiting) > STILL_S
    assert np.count_nonzero(waiting > STILL_S / 2) == 1
    assert np.count_nonzero(arriving > STILL_S / 2) > QUERIES / 5
    assert np.percentile(waiting, 90) < STILL_S / 2 < np.percentile(arriving, 90)
