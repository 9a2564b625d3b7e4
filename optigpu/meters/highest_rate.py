"""highest_rate: the highest rate of arrivals at which a load keeps its limits, by bisection, with its interval."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np

from optigpu.documents.facts import MeterFacts
from optigpu.documents.rounds import LoadRun
from optigpu.documents.selftest import Comparison
from optigpu.load.batching import Batching, VirtualClock
from optigpu.load.figures import Limits, figures_of
from optigpu.load.queries import Schedule
from optigpu.meters.base import Meter, MeterContext, Reading
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import LoadRequest

Try = Callable[[float], LoadRun]
"""One run at a rate, in queries a second."""

CLOSE_ENOUGH = 1.1
"""The search ends when the rate that failed is at most this many times the rate that held."""
FACTOR = 2.0
LOWEST = 64
"""No rate is tried below this part of the first: its runs would take too long."""


@dataclass(frozen=True)
class Tried:
    """One rate: how many of its runs kept the limits, and in how many the queue grew without an end."""

    rate: float
    runs: int
    kept: int
    saturated: int
    met_share: float

    @property
    def holds(self) -> bool:
        return 2 * self.kept > self.runs


@dataclass(frozen=True)
class HighestRate:
    """What a search found. `rate` is the highest at which most runs kept the limits, 0 where none did. The true one
    lies between `low`, the highest rate up to which every run of every rate kept them, and `high`, the lowest from
    which on none did; `high` is None where no rate failed."""

    rate: float
    low: float
    high: float | None
    tried: tuple[Tried, ...]


def highest_rate(attempt: Try, first: float, *, share: float, runs: int, most: float) -> HighestRate:
    """Doubles or halves the rate from `first` until one holds and another does not, then bisects between them. A run
    keeps the limits where at least `share` of its queries met them and its queue did not grow without an end. Each
    rate has so many `runs`; none is above `most`."""
    tried: dict[float, Tried] = {}

    def holds(rate: float) -> bool:
        if rate not in tried:
            found = [attempt(rate) for _ in range(runs)]
            tried[rate] = Tried(
                rate=rate,
                runs=runs,
                kept=sum(run.met_share >= share and not run.saturated for run in found),
                saturated=sum(bool(run.saturated) for run in found),
                met_share=sum(run.met_share for run in found) / runs,
            )
        return tried[rate].holds

    rate = min(first, most)
    if holds(rate):
        while holds(rate) and rate < most:
            rate = min(rate * FACTOR, most)
    else:
        while not holds(rate) and rate > first / LOWEST:
            rate /= FACTOR
    good, bad = _between(tried.values())
    while good and bad and bad > CLOSE_ENOUGH * good:
        holds((good * bad) ** 0.5)
        good, bad = _between(tried.values())
    every = sorted(tried.values(), key=lambda each: each.rate)
    doubtful = [each for each in every if each.kept < each.runs]
    low = max((each.rate for each in every if not doubtful or each.rate < doubtful[0].rate), default=0.0)
    with_one = [each.rate for each in every if each.kept]
    high = min((each.rate for each in every if not with_one or each.rate > with_one[-1]), default=None)
    return HighestRate(good or 0.0, low, high, tuple(every))


def _between(tried: Collection[Tried]) -> tuple[float | None, float | None]:
    """The highest rate below every one that failed, and the lowest that failed."""
    bad = min((each.rate for each in tried if not each.holds), default=None)
    good = max((each.rate for each in tried if each.holds and (bad is None or each.rate < bad)), default=None)
    return good, bad


NAME = "highest_rate_per_s"
RUNS = 3
"""Of each rate."""
SHARE = 0.99
"""Of the queries of a run must meet the limits, as MLPerf's scenario Server judges by the 99th percentile."""
MOST = 10_000.0
SIMULATED_RATE = 50.0


class HighestRateMeter(Meter):
    """Searches from the workload's own rate."""

    timed: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (NAME,)

    def read(self, context: MeterContext) -> Reading:
        """The rate, and as facts the interval and every rate that was tried."""
        request = context.request
        if not isinstance(request, LoadRequest):
            return self.none("Requests arrive at a rate only in the workload serve; measure that.")
        try:
            first = request.first_rate()
        except UnsupportedError as error:
            return self.none(str(error))
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
        schedule = Schedule("Server", 2000, (1, 1), (2, 2))
        source, rate = np.random.default_rng(0), SIMULATED_RATE

        def attempt(asked: float) -> LoadRun:
            clock = VirtualClock()
            server = Batching(SimulatedSlots(clock, 1, 0.5 / rate, 0.5 / rate), clock)
            load = replace(schedule, rate=asked).draw(source)
            return figures_of(server.run(load, [[0]] * schedule.count), Limits(), is_open=True)

        found = highest_rate(attempt, rate / 4, share=SHARE, runs=RUNS, most=MOST)
        return Comparison(
            abs(found.rate / rate - 1), 0.3, "the rate at which a simulated engine's queue begins to grow"
        )


class SimulatedSlots:
    """Slots that decode nothing: a prefill takes `prefill_s`, a step of any number of sequences `step_s`. The first
    call after the moment of a stall takes that much longer."""

    block_tokens = 1

    def __init__(
        self,
        clock: VirtualClock,
        count: int,
        prefill_s: float,
        step_s: float,
        stalls: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.count, self.length = count, 2**20
        self._clock, self._prefill_s, self._step_s = clock, prefill_s, step_s
        self._stalls = sorted(stalls, reverse=True)

    def join(self, slot: int, prompt: Sequence[int]) -> int:
        self._work(self._prefill_s)
        return 0

    def step(self, slots: Sequence[int]) -> Sequence[int]:
        self._work(self._step_s)
        return [0] * len(slots)

    def leave(self, slot: int) -> None:
        """Takes no time."""

    def close(self) -> None:
        """There is nothing to give back."""

    def _work(self, seconds: float) -> None:
        while self._stalls and self._stalls[-1][0] <= self._clock.now():
            self._clock.pass_by(self._stalls.pop()[1])
        self._clock.pass_by(seconds)
