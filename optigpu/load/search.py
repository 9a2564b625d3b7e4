"""The highest rate of requests that a server takes while it keeps its limits, with the interval that it lies in."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from optigpu.documents.load import LoadRun

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
        """Whether most runs kept the limits."""
        return 2 * self.kept > self.runs


@dataclass(frozen=True)
class HighestRate:
    """What a search found.

    `rate` is the highest at which most runs kept the limits, 0 where none did. The true one lies between `low`, the
    highest rate up to which every run of every rate kept them, and `high`, the lowest from which on none did; `high` is
    None where no rate failed.
    """

    rate: float
    low: float
    high: float | None
    tried: tuple[Tried, ...]


def highest_rate(attempt: Try, first: float, *, share: float, runs: int, most: float) -> HighestRate:
    """Doubles or halves the rate from `first` until one holds and another does not, then bisects between them.

    A run keeps the limits where at least `share` of its queries met them and its queue did not grow without an end.
    Each rate has so many `runs`; none is above `most`.
    """
    tried: dict[float, Tried] = {}

    def holds(rate: float) -> bool:
        if rate not in tried:
            tried[rate] = _try(attempt, rate, share, runs)
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
    return _found(tried.values())


def _try(attempt: Try, rate: float, share: float, runs: int) -> Tried:
    found = [attempt(rate) for _ in range(runs)]
    return Tried(
        rate=rate,
        runs=runs,
        kept=sum(run.met_share >= share and not run.saturated for run in found),
        saturated=sum(bool(run.saturated) for run in found),
        met_share=sum(run.met_share for run in found) / runs,
    )


def _between(tried: Collection[Tried]) -> tuple[float | None, float | None]:
    """The highest rate below every one that failed, and the lowest that failed."""
    bad = min((each.rate for each in tried if not each.holds), default=None)
    good = max((each.rate for each in tried if each.holds and (bad is None or each.rate < bad)), default=None)
    return good, bad


def _found(tried: Collection[Tried]) -> HighestRate:
    every = sorted(tried, key=lambda each: each.rate)
    doubtful = [each for each in every if each.kept < each.runs]
    low = max((each.rate for each in every if not doubtful or each.rate < doubtful[0].rate), default=0.0)
    with_one = [each.rate for each in every if each.kept]
    high = min((each.rate for each in every if not with_one or each.rate > with_one[-1]), default=None)
    good, _ = _between(every)
    return HighestRate(good or 0.0, low, high, tuple(every))
