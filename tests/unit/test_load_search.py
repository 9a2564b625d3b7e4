"""The search for the highest rate, on servers whose capacity is known."""

from dataclasses import replace

import numpy as np
import pytest

from optigpu.documents.load import LittlesLaw, LoadRun
from optigpu.load.batching import Batching
from optigpu.load.clock import VirtualClock
from optigpu.load.figures import Limits, figures_of
from optigpu.load.queries import Schedule
from optigpu.load.search import CLOSE_ENOUGH, highest_rate
from optigpu.load.simulated import SimulatedSlots


def a_run(met: int, of: int = 100, *, saturated: bool = False) -> LoadRun:
    law = LittlesLaw(counted=1, rate=1, latency_s=1, late_s=0, tolerance=0)
    moments = (1.0,) * of
    return LoadRun(
        seconds=1, sent_s=moments, prompt_tokens=(1,) * of, output_tokens=(2,) * of, ttft_s=moments, tpot_s=moments,
        latency_s=moments, goodput_per_s=met, met=met, waiting=0, queue=(), saturated=saturated, law=law,
    )  # fmt: skip


@pytest.mark.parametrize("first", [1.0, 7.0, 100.0])
def test_it_ends_close_to_a_sharp_edge_from_either_side(first: float) -> None:
    found = highest_rate(lambda rate: a_run(100 if rate <= 20 else 0), first, share=0.99, runs=3, most=1000)
    assert found.rate <= 20 < (found.high or 0)
    assert (found.high or 0) <= CLOSE_ENOUGH * found.rate * 1.0001
    assert found.low == found.rate
    assert all(tried.runs == 3 for tried in found.tried)


def test_runs_that_disagree_make_the_interval_wide() -> None:
    calls: dict[float, int] = {}

    def uncertain(rate: float) -> LoadRun:
        calls[rate] = calls.get(rate, 0) + 1
        holds = rate < 10 or (rate < 30 and calls[rate] % 3 != 0)
        return a_run(100 if holds else 0)

    found = highest_rate(uncertain, 2, share=0.99, runs=3, most=1000)
    assert found.low < 10 < found.rate <= 30 <= (found.high or 0)


def test_a_growing_queue_does_not_hold_though_all_met_the_limits() -> None:
    found = highest_rate(lambda rate: a_run(100, saturated=rate > 4), 1, share=0.99, runs=1, most=64)
    assert found.rate == pytest.approx(4, rel=0.1)


def test_where_no_rate_holds_it_is_zero_and_ends() -> None:
    found = highest_rate(lambda _: a_run(98), 64, share=0.99, runs=1, most=1000)
    assert (found.rate, found.low, found.high) == (0, 0, 1)
    assert len(found.tried) == 7


def test_with_a_limit_it_stays_below_the_rate_of_an_engine() -> None:
    """It serves 50 a second, one after the other, and 99% of the waits must be within three services."""
    source = np.random.default_rng(0)
    schedule = Schedule("Server", 2000, (1, 1), (2, 2))

    def attempt(rate: float) -> LoadRun:
        clock = VirtualClock()
        server = Batching(SimulatedSlots(clock, 1, 0.01, 0.01), clock)
        run = server.run(replace(schedule, rate=rate).draw(source), [[0]] * 2000)
        return figures_of(run, Limits(ttft_s=0.07), is_open=True)

    found = highest_rate(attempt, 10, share=0.99, runs=3, most=1000)
    assert 15 < found.rate < 40
