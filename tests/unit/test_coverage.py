"""Statistics by simulation: 95% intervals hold in 93% to 97% of draws, and few pairs are decided wrongly."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from optigpu.documents.result import Measurement
from optigpu.documents.views import Decision
from optigpu.statistics.compare import compare
from optigpu.statistics.estimates import (
    Estimate,
    Statistic,
    difference,
    leave_one_out,
    mean_of,
    part_bounds,
    parts_of,
    share_bounds,
)
from optigpu.statistics.intervals import (
    fewest_for,
    interval,
    paired_ratio,
    process_percentile,
    ratio,
    summarise,
)
from optigpu.statistics.within import (
    FEWEST_FOR_INTERVAL,
    dependence,
    enough_for,
    freedom_of,
    median_bounds,
    median_error,
)
from tests.breadth import cases, spread
from tests.known import known
from tests.unit.made_replicates import TAILS, TRUE, Array, Tail, coverage, noise, positive, requests, series
from tests.unit.test_compare import beside, document, one

pytestmark = pytest.mark.slow
DRAWS = 4000
LEAST, MOST = 0.93, 0.97
LOG_TRUE = float(np.log(TRUE))


def logs(values: Array) -> Array:
    """The logarithms of each process's median, [draws, processes]."""
    return np.asarray(np.log(np.median(values, axis=-1)))


@pytest.mark.parametrize(("processes", "correlation", "tail"), spread([2, 3, 5, 10], [0.0, 0.5, 0.9], TAILS))
def test_an_interval_over_processes_holds(processes: int, correlation: float, tail: Tail) -> None:
    rng = np.random.default_rng(processes)
    for between in (0.1, 1.0, 10.0):
        values = requests(rng, tail, (DRAWS, processes, 9), between, correlation)
        assert LEAST <= coverage(mean_of(logs(values)).bounds(), LOG_TRUE) <= MOST, between
        # What was simulated at once is what is computed of one result.
        samples = tuple(map(tuple, values[0].tolist()))
        low, high = mean_of(logs(values)).bounds()
        assert interval(samples) == pytest.approx((np.exp(low[0]), np.exp(high[0])))


@pytest.mark.parametrize(
    ("count", "correlation", "tail"),
    spread([FEWEST_FOR_INTERVAL, 29, 45, 80, 200], [0.0, 0.3, 0.6, 0.9], TAILS, by_default=3),
)
def test_the_interval_of_one_process_holds_for_its_own_median(
    count: int, correlation: float, tail: Tail
) -> None:
    rng = np.random.default_rng(count)
    values = np.log(positive(tail, series(rng, tail, DRAWS, count, correlation)))
    low, high = median_bounds(values)
    assert LEAST <= coverage((low, high), LOG_TRUE) <= MOST
    assert interval((tuple(np.exp(values[0]).tolist()),)) == pytest.approx((np.exp(low[0]), np.exp(high[0])))


def test_the_interval_of_one_process_holds_beside_noise_that_hides_its_correlation() -> None:
    """A slow wave under white noise of the same size: neighbours correlate by 0.45 only."""
    rng = np.random.default_rng(1)
    slow = series(rng, "normal", DRAWS, 300, 0.9)
    covered = coverage(median_bounds(slow + rng.normal(size=slow.shape)), 0.0)
    assert LEAST <= covered <= MOST


def ends_of(values: Array, goal: float) -> NDArray[np.int64]:
    """How many of its requests [draws, requests] each process ends with, of those that there are at most."""
    counts = np.full(len(values), FEWEST_FOR_INTERVAL)
    goes_on = np.full(len(values), True)
    while goes_on.any():
        for count in np.unique(counts[goes_on]):
            rows = np.flatnonzero(goes_on & (counts == count))
            needed, ends = enough_for(values[rows, :count], goal)
            counts[rows] = np.minimum(np.ceil(needed), values.shape[1])
            goes_on[rows] = ~ends & (counts[rows] < values.shape[1])
    return counts


@pytest.mark.parametrize(
    ("correlation", "goal", "tail"),
    spread(
        [0.0, 0.5, 0.9], [(0.005, "normal"), (0.02, "normal"), (0.01, "t3"), (0.2, "lognormal")], by_default=3
    ),
)
def test_intervals_hold_nearly_as_often_where_they_say_when_to_end(
    correlation: float, goal: float, tail: Tail
) -> None:
    """One process whose neighbours resemble each other much misses 93% by a point: decision 5 has each case."""
    values = positive(tail, series(np.random.default_rng(7), tail, 3000, 800, correlation))
    counts, covered, medians = ends_of(values, goal), 0.0, np.empty(len(values))
    for count in np.unique(counts):
        ended = np.log(values[counts == count, :count])
        covered += len(ended) * coverage(median_bounds(ended), LOG_TRUE) / len(values)
        medians[counts == count] = np.median(ended, axis=-1)
    assert LEAST - 0.01 * (correlation > 0.5) <= covered <= MOST
    assert LEAST <= coverage(mean_of(medians.reshape(-1, 3)).bounds(), LOG_TRUE) <= MOST


@pytest.mark.parametrize(
    ("ours", "theirs", "tail"),
    spread([(2, 2), (2, 3), (3, 3), (3, 5), (5, 5), (6, 10), (10, 10)], TAILS, by_default=3),
)
def test_the_ratio_of_independent_processes_holds(ours: int, theirs: int, tail: Tail) -> None:
    rng = np.random.default_rng(ours)
    for between in (0.1, 10.0):
        above, below = (
            logs(requests(rng, tail, (DRAWS, count, 9), between, 0.5)) for count in (ours, theirs)
        )
        assert LEAST <= coverage(difference(mean_of(above), mean_of(below)).bounds(), 0.0) <= MOST, between


@pytest.mark.parametrize(("ours", "theirs", "spread"), [(2, 2, 2.0), (3, 3, 3.0), (5, 5, 10.0), (6, 10, 0.5)])
def test_the_ratio_holds_where_one_side_varies_more(ours: int, theirs: int, spread: float) -> None:
    rng = np.random.default_rng(4)
    above, below = rng.normal(size=(4 * DRAWS, ours)), spread * rng.normal(size=(4 * DRAWS, theirs))
    assert LEAST <= coverage(difference(mean_of(above), mean_of(below)).bounds(), 0.0) <= MOST


def of_process(values: Array) -> Estimate:
    """The logarithm of each process's median, from its requests [draws, requests]."""
    logarithms = np.log(values)
    centres = np.median(logarithms, axis=-1)
    return Estimate(
        centres, median_error(logarithms), np.full(len(values), float(freedom_of(values.shape[-1])))
    )


@pytest.mark.parametrize(("count", "correlation"), spread([24, 61, 201], [0.0, 0.5, 0.9]))
def test_the_ratio_of_two_single_processes_holds_for_these_two(count: int, correlation: float) -> None:
    rng = np.random.default_rng(count)
    above, below = (positive("normal", series(rng, "normal", DRAWS, count, correlation)) for _ in range(2))
    low, high = difference(of_process(above), of_process(below)).bounds()
    assert LEAST <= coverage((low, high), 0.0) <= MOST
    found = ratio((tuple(above[0].tolist()),), (tuple(below[0].tolist()),))[1]
    assert found == pytest.approx((np.exp(low[0]), np.exp(high[0])))


@pytest.mark.parametrize(("processes", "tail"), spread([2, 3, 5, 10], TAILS))
def test_the_ratio_of_pairs_holds_however_much_disturbs_both(processes: int, tail: Tail) -> None:
    rng = np.random.default_rng(processes)
    common = rng.normal(size=(DRAWS, processes, 1))
    sides = [
        np.exp(common) * requests(rng, tail, (DRAWS, processes, 9), between, 0.5) for between in (0.1, 10)
    ]
    found = mean_of(logs(sides[0]) - logs(sides[1])).bounds()
    assert LEAST <= coverage(found, 0.0) <= MOST
    ours, theirs = (tuple(map(tuple, side[0].tolist())) for side in sides)
    assert paired_ratio(ours, theirs)[1] == pytest.approx((np.exp(found[0][0]), np.exp(found[1][0])))


@pytest.mark.parametrize(("count", "tail"), spread([2, 3, 5, 10], TAILS))
def test_the_ratio_of_turns_holds_whatever_the_medians_say(count: int, tail: Tail) -> None:
    rng = np.random.default_rng(count)
    factors = np.exp(np.log(1.2) + 0.02 * noise(rng, tail, (DRAWS // 2, count)))
    low, high = mean_of(np.log(factors)).bounds()
    assert LEAST <= coverage((low, high), float(np.log(1.2))) <= MOST
    medians = rng.lognormal(4.0, 0.15, (2, count))
    baseline, candidate = (document(tuple((median,) for median in side.tolist())) for side in medians)
    for draw in range(20):
        found = compare(beside(baseline, 0), beside(candidate, 1, factors[draw].tolist()))
        assert found.metrics["tokens_per_s"].ci == pytest.approx((np.exp(low[draw]), np.exp(high[draw])))


@pytest.mark.parametrize(
    ("processes", "count", "correlation", "between", "tail"),
    cases(
        [
            (2, 64, 0.0, 0.1, "normal"),
            (5, 200, 0.5, 1.0, "lognormal"),
            (3, 64, 0.0, 10.0, "normal"),
            (10, 64, 0.0, 0.1, "t3"),
            (10, 600, 0.8, 0.1, "normal"),
            (3, 900, 0.9, 1.0, "normal"),
        ]
    ),
)
def test_the_upper_bound_of_a_percentile_holds(
    processes: int, count: int, correlation: float, between: float, tail: Tail
) -> None:
    """The bound of p90 is above the percentile of a process in the middle of all processes."""
    rng = np.random.default_rng(processes)
    draws = min(DRAWS, 6_000_000 // (processes * count))
    values = requests(rng, tail, (draws, processes, count), between, correlation)
    z90 = {"normal": 1.28155, "lognormal": 1.28155, "t3": 1.63774}[tail] / np.hypot(1.0, between)
    truth = float(positive(tail, np.array(z90)))
    alike = np.maximum(1.0, np.mean(dependence(values), axis=-1))
    uppers = np.exp(mean_of(np.log(process_percentile(values, 0.9, alike[:, None]))).upper())
    enough = count / alike >= fewest_for(90, 0.05)
    assert enough.mean() > 0.7
    assert LEAST <= np.mean(uppers[enough] >= truth) <= MOST
    summary = summarise(Measurement(name="latency_s", samples=tuple(map(tuple, values[0].tolist()))))
    assert summary.p90_upper == (pytest.approx(uppers[0]) if enough[0] else None)


def mean_of_kept(values: NDArray[Any]) -> Statistic:
    """The mean as a statistic that windows are left out of."""
    return lambda kept: float(values[kept].mean())


@pytest.mark.parametrize(("windows", "positions"), cases([(5, 50), (6, 87), (11, 47), (40, 30)]))
def test_the_interval_of_a_divergence_over_windows_holds(windows: int, positions: int) -> None:
    """Divergences of positions are lognormal, as wide as measured ones are, and windows differ."""
    rng = np.random.default_rng(windows)
    logarithms = 0.8 * rng.normal(size=(2000, windows, positions)) + 0.2 * rng.normal(size=(2000, windows, 1))
    parts = parts_of(np.repeat(np.arange(windows), positions))
    truth, covered = float(np.exp((0.8**2 + 0.2**2) / 2)), 0
    for draw in np.exp(logarithms).reshape(2000, -1):
        bounds = known(part_bounds(float(draw.mean()), leave_one_out(mean_of_kept(draw), parts)))
        covered += bounds[0] <= truth <= bounds[1]
    assert LEAST <= covered / 2000 <= MOST


@pytest.mark.parametrize(
    ("windows", "positions", "share"), cases([(6, 87, 0.9), (11, 47, 0.95), (64, 1, 0.8)])
)
def test_the_interval_of_a_share_over_windows_holds(windows: int, positions: int, share: float) -> None:
    rng = np.random.default_rng(windows)
    spread = 0.3 if positions > 1 else 0.0
    odds = np.log(share / (1 - share)) + spread * rng.normal(size=(400_000,))
    truth = float(np.mean(1 / (1 + np.exp(-odds))))
    parts = parts_of(np.repeat(np.arange(windows), positions))
    covered = 0
    for window_odds in odds[: 2000 * windows].reshape(2000, windows, 1):
        agrees = (rng.random((windows, positions)) < 1 / (1 + np.exp(-window_odds))).ravel()
        without = leave_one_out(mean_of_kept(agrees), parts)
        bounds = known(share_bounds(float(agrees.mean()), len(agrees), without))
        covered += bounds[0] <= truth <= bounds[1]
    assert LEAST <= covered / 2000 <= MOST


DIFFERENT = (Decision.BETTER, Decision.WORSE)
PAIRS = (
    (0.01, 0.0, Decision.EQUIVALENT, 60, DIFFERENT, 8),
    (0.01, 0.05, Decision.WORSE, 80, DIFFERENT[:1], 0),
    (0.04, 0.0, Decision.UNDECIDED, 60, DIFFERENT, 8),
)
"""How far processes are spread, how much faster one side is, and of 100 pairs what most and few are called."""


@pytest.mark.parametrize(
    ("spread", "change", "right", "least", "wrong", "most", "seed"),
    cases([(*pairs, seed) for seed in range(3) for pairs in PAIRS][:-1], by_default=3),
)
def test_most_of_100_pairs_are_decided_rightly_and_few_wrongly(
    spread: float,
    change: float,
    right: Decision,
    least: int,
    wrong: tuple[Decision, ...],
    most: int,
    seed: int,
) -> None:
    """Of 5 interleaved processes each, whose medians vary by `spread`."""
    rng = np.random.default_rng(seed)
    found: dict[Decision, int] = dict.fromkeys(Decision, 0)
    for _ in range(100):
        common = 0.05 * rng.standard_normal(5)
        ours, theirs = (
            100 * level * np.exp(common + spread * rng.standard_normal(5)) for level in (1, 1 + change)
        )
        first, second = (document(tuple((float(m),) for m in side), "latency_s") for side in (ours, theirs))
        found[known(one(beside(first, 0), beside(second, 1), "latency_s").decision)] += 1
    assert sum(found[each] for each in wrong) <= most
    assert found[right] >= least
