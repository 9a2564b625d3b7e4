"""Intervals, percentiles and ratios: what they are, when they are null, and properties that must always hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optigpu.documents.result import Measurement, Samples
from optigpu.statistics.estimates import t_quantile
from optigpu.statistics.intervals import interval, paired_ratio, ratio, summarise, value_of
from optigpu.statistics.within import (
    FEWEST_FOR_INTERVAL,
    FEWEST_REQUESTS,
    FURTHER,
    dependence,
    enough_for,
    mid_ranks,
)
from optigpu.vocabulary import METRICS
from tests.known import known

NUMBERS = st.floats(1e-6, 1e6)
SAMPLES = st.lists(st.lists(NUMBERS, min_size=1, max_size=30).map(tuple), min_size=1, max_size=5).map(tuple)


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.95, 4, 2.1318), (0.975, 9, 2.2622), (0.95, 1000, 1.6464)],
)
def test_student_s_t_is_that_of_the_tables(probability: float, freedom: float, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=1e-4)


def test_the_value_is_the_geometric_mean_so_that_ratios_and_inverses_agree() -> None:
    times = ((1.0, 1.0, 1.1), (4.0, 4.0, 3.9))
    rates = tuple(tuple(1 / each for each in process) for process in times)
    assert value_of(times) == pytest.approx(2.0)
    assert value_of(rates) == pytest.approx(1 / value_of(times))
    assert value_of(((0.0,), (4.0,))) == 2.0
    assert value_of(((497_760_000.0,),) * 3) == 497_760_000.0


def test_several_processes_have_student_s_interval_of_their_logarithms() -> None:
    samples = ((1.0, 1.0, 9.0), (2.0, 2.0, 2.0), (4.0, 0.1, 4.0))
    half = t_quantile(0.975, 2) * math.log(2) / math.sqrt(3)
    assert interval(samples) == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))


def test_a_percentile_is_that_of_each_process_and_its_bound_is_over_processes() -> None:
    rng = np.random.default_rng(0)
    fast, slow = (tuple(each * rng.permutation(np.linspace(0.9, 1.1, 201))) for each in (1.0, 4.0))
    both = summarise(Measurement(name="latency_s", samples=(fast, slow)))
    alone = summarise(Measurement(name="latency_s", samples=(fast,)))
    assert known(alone.p90) == pytest.approx(1.08, abs=0.001)
    assert both.p90 == pytest.approx(2 * 1.08, abs=0.002)
    half = t_quantile(0.95, 1) * math.log(4) / 2
    assert both.p90_upper == pytest.approx(2 * known(alone.p90) * math.exp(half))
    assert alone.p90_upper is None
    assert "Upper bounds of percentiles need 2 processes or more." in (alone.reason or "")


def test_a_process_with_few_requests_leaves_no_upper_bound() -> None:
    rng = np.random.default_rng(1)
    many, few = (tuple(0.001 * rng.permutation(range(1, count))) for count in (701, 101))
    summary = summarise(Measurement(name="latency_s", samples=(many, few)))
    assert None not in (summary.p90, summary.p95, summary.p99, summary.p90_upper)
    assert (summary.p95_upper, summary.p99_upper) == (None, None)
    assert summary.reason == (
        "Upper bounds of percentiles need more than the 100 requests of one process: p95 130, p99 662."
    )


def test_requests_that_resemble_each_other_count_as_fewer() -> None:
    rng = np.random.default_rng(2)
    waves = [np.exp(0.1 * np.sin(np.arange(300) / 30 + phase)) for phase in (0.0, 1.0)]
    slow = tuple(tuple(wave * rng.lognormal(0, 0.005, 300)) for wave in waves)
    summary = summarise(Measurement(name="latency_s", samples=slow))
    assert summary.p90 is not None
    assert summary.p90_upper is None
    assert "(they resemble each other and count as " in (summary.reason or "")
    assert known(summary.n_effective) < 30
    independent = summarise(Measurement(name="latency_s", samples=(tuple(rng.lognormal(0, 0.1, 300)),) * 2))
    assert known(independent.n_effective) > 150


def test_a_clock_of_coarse_steps_makes_no_correlation() -> None:
    coarse = np.round(np.random.default_rng(3).normal(10, 1, (200, 300)))
    assert np.mean(dependence(coarse)) == pytest.approx(1.0, abs=0.25)
    assert mid_ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_what_was_not_measured_is_null_with_its_reason() -> None:
    summary = summarise(Measurement(name="peak_bytes", reason="no GPU"))
    assert (summary.value, summary.ci, summary.n, summary.reason) == (None, None, 0, "no GPU")
    assert summary.unit == METRICS["peak_bytes"].unit


def test_a_replicate_without_a_number_does_not_count() -> None:
    summary = summarise(Measurement(name="compile_s", samples=((2.0,), (), (4.0,))))
    assert summary.value == pytest.approx(math.sqrt(8))
    assert (summary.n, summary.replicates) == (2, 2)


def test_too_few_requests_of_one_process_have_no_interval_and_say_why() -> None:
    few = tuple(np.linspace(0.9, 1.1, FEWEST_FOR_INTERVAL - 1).tolist())
    assert interval((few,)) is None
    assert ratio((few,), (few,)) == (1.0, None)
    summary = summarise(Measurement(name="tokens_per_s", samples=(few,)))
    assert (summary.ci, summary.freedom) == (None, None)
    assert summary.reason == (
        "An interval needs several processes, or 24 requests of one; there is one process with 23."
    )
    enough = summarise(Measurement(name="tokens_per_s", samples=((*few, 1.0),)))
    assert enough.ci is not None
    assert (enough.freedom, enough.reason) == (2, None)


@pytest.mark.parametrize(("count", "needed", "ends"), [(FEWEST_REQUESTS - 1, 15, False), (24, 24, True)])
def test_equal_requests_are_enough_as_soon_as_there_are_any(count: int, needed: int, ends: bool) -> None:
    assert tuple(map(float, enough_for(np.ones(count), 0.01))) == (needed, ends)
    of_nothing = enough_for(np.zeros(count), 0.01)
    assert tuple(map(float, of_nothing)) == (FURTHER * count, False)


def test_as_many_requests_are_foreseen_as_a_median_needs() -> None:
    values = np.random.default_rng(8).normal(100, 1, (400, 100))
    for width in (0.004, 0.005):
        needed, _ = enough_for(values, width)
        assert np.median(needed) == pytest.approx(math.pi / 2 * (2 * 1.96 / 100 / width) ** 2, rel=0.1)


@given(SAMPLES)
def test_values_lie_within_the_samples_and_within_their_interval(samples: Samples) -> None:
    every = [number for process in samples for number in process]
    value = value_of(samples)
    assert min(every) * (1 - 1e-12) <= value <= max(every) * (1 + 1e-12)
    bounds = interval(samples)
    assert bounds is None or bounds[0] * (1 - 1e-9) <= value <= bounds[1] * (1 + 1e-9)


@given(st.integers(0, 2**32 - 1), st.integers(662, 800), st.floats(0, 3))
def test_percentiles_are_ordered(seed: int, requests: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    samples = tuple(tuple(rng.lognormal(sigma=spread, size=requests).tolist()) for _ in range(2))
    summary = summarise(Measurement(name="ttft_s", samples=samples))
    found = [summary.p50, summary.p90, summary.p95, summary.p99]
    uppers = [summary.p90_upper, summary.p95_upper]
    known = [number for number in found if number is not None]
    assert known == sorted(known)
    assert len(known) == 4
    assert all(low <= high for low, high in zip(known[1:], filter(None, uppers), strict=False))


@pytest.mark.slow
@given(SAMPLES, SAMPLES)
def test_a_ratio_and_its_inverse_agree(ours: Samples, theirs: Samples) -> None:
    quotient, bounds = ratio(ours, theirs)
    inverse, turned = ratio(theirs, ours)
    assert quotient * inverse == pytest.approx(1)
    assert bounds is None or turned is None or (1 / bounds[1], 1 / bounds[0]) == pytest.approx(turned)


def test_pairs_leave_out_what_disturbed_both_alike() -> None:
    slow, fast = tuple([10.0 + 0.001 * i for i in range(8)]), tuple([20.0 + 0.001 * i for i in range(8)])
    ours, theirs = (
        (slow, fast, slow),
        tuple(tuple(2 * value for value in process) for process in (slow, fast, slow)),
    )
    paired, unpaired = paired_ratio(theirs, ours), ratio(theirs, ours)
    assert paired[0] == unpaired[0] == pytest.approx(2)
    assert known(paired[1])[1] - known(paired[1])[0] < 0.01 < known(unpaired[1])[1] - known(unpaired[1])[0]


def test_turns_say_the_ratio_of_each_pair_and_of_a_single_one() -> None:
    theirs, ours = ((1.0, 1.02) * 14, (2.0, 2.04) * 14), ((1.1, 1.12) * 14, (2.4, 2.44) * 14)
    found, bounds = paired_ratio(ours, theirs, (1.25, 1.25 * 1.21))
    assert found == pytest.approx(1.25 * 1.1)
    half = t_quantile(0.975, 1) * math.log(1.1)
    assert bounds == pytest.approx((found * math.exp(-half), found * math.exp(half)))
    quotient, around = ratio(ours[:1], theirs[:1])
    single, moved = paired_ratio(ours[:1], theirs[:1], (1.25,))
    assert single == 1.25
    assert moved == pytest.approx((1.25 * known(around)[0] / quotient, 1.25 * known(around)[1] / quotient))
    assert paired_ratio(ours[:1], ((1.0,),), (1.25,)) == (1.25, None)
