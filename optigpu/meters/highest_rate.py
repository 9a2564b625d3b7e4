"""highest_rate: the highest rate of arrivals at which a load keeps its limits, by bisection, with its interval."""

from dataclasses import asdict, replace
from typing import ClassVar

import numpy as np

from optigpu.documents.facts import MeterFacts
from optigpu.documents.load import LoadRun
from optigpu.documents.selftest import Comparison
from optigpu.load.batching import Batching
from optigpu.load.clock import VirtualClock
from optigpu.load.figures import Limits, figures_of
from optigpu.load.queries import Schedule
from optigpu.load.search import HighestRate, highest_rate
from optigpu.load.simulated import SimulatedSlots
from optigpu.meters.base import MeterContext, Reading
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import LoadRequest

NAME = "highest_rate_per_s"
RUNS = 3
"""Of each rate."""
SHARE = 0.99
"""Of the queries of a run must meet the limits, as MLPerf's scenario Server judges by the 99th percentile."""
MOST = 10_000.0
SIMULATED_RATE = 50.0


class HighestRateMeter:
    """Searches from the workload's own rate."""

    once: ClassVar[bool] = False
    timed: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (NAME,)

    def read(self, context: MeterContext) -> Reading:
        """The rate, and as facts the interval and every rate that was tried."""
        request = context.request
        if not isinstance(request, LoadRequest):
            return Reading(
                reasons={NAME: "Requests arrive at a rate only in the workload serve; measure that."}
            )
        try:
            first = request.first_rate()
        except UnsupportedError as error:
            return Reading(reasons={NAME: str(error)})
        found = highest_rate(request.at, first, share=SHARE, runs=RUNS, most=MOST)
        facts = MeterFacts(recorded={NAME: asdict(found)})
        if not found.rate:
            least = min(each.rate for each in found.tried)
            return Reading(
                reasons={NAME: f"Not even {least:g} requests a second kept the limits."}, facts=facts
            )
        return Reading({NAME: found.rate}, facts=facts)

    def self_test(self, context: MeterContext) -> Comparison:
        """A simulated engine that serves one query at a time, and SIMULATED_RATE of them a second."""
        found = _of_simulated(SIMULATED_RATE)
        return Comparison(
            abs(found.rate / SIMULATED_RATE - 1),
            0.3,
            "the rate at which a simulated engine's queue begins to grow",
        )


def _of_simulated(rate: float) -> HighestRate:
    schedule = Schedule("Server", 2000, (1, 1), (2, 2))
    source = np.random.default_rng(0)

    def attempt(asked: float) -> LoadRun:
        clock = VirtualClock()
        server = Batching(SimulatedSlots(clock, 1, 0.5 / rate, 0.5 / rate), clock)
        load = replace(schedule, rate=asked).draw(source)
        run = server.run(load, [[0]] * schedule.count)
        return figures_of(run, Limits(), is_open=True)

    return highest_rate(attempt, rate / 4, share=SHARE, runs=RUNS, most=MOST)
