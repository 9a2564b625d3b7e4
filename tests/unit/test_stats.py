"""Intervals and percentiles: coverage by simulation, and properties that must always hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optigpu.documents.result import Measurement, Samples
from optigpu.statistics.intervals import (
    FEWEST_REQUESTS,
    describe,
    fewest_for,
    interval,
    paired_ratio,
    ratio,
    relative_width,
    summarise,
    upper_bound_rank,
    value_of,
)
from optigpu.vocabulary import METRICS, Better

TRUE = 100.0
DRAWS = 400
NUMBERS = st.floats(1e-6, 1e6)
SAMPLES = st.lists(st.lists(NUMBERS, min_size=1, max_size=30).map(tuple), min_size=1, max_size=5).map(tuple)


def simulated(
    rng: np.random.Generator,
    replicates: int,
    requests: int,
    between: float,
    within: float,
    skewed: bool = False,
) -> Samples:
    """Processes whose medians scatter around TRUE by `between`, their requests around those by `within`."""
    centres = rng.normal(TRUE, between, replicates)
    shape = (replicates, requests)
    noise = rng.exponential(1, shape) - math.log(2) if skewed else rng.normal(0, 1, shape)
    return tuple(tuple(row) for row in (centres[:, None] + within * noise).tolist())


@pytest.mark.parametrize(
    ("replicates", "requests", "between", "within", "skewed"),
    [
        (1, 6, 0, 1, False),
        (1, 50, 0, 1, False),
        (1, 50, 0, 1, True),
        (2, 20, 1, 0.5, False),
        (3, 20, 0, 1, False),
        (3, 50, 1, 0.1, False),
        (3, 1, 1, 0, False),
        (3, 40, 1, 1, True),
        (5, 20, 1, 0.1, False),
        (12, 20, 1, 1, False),
    ],
)
def test_intervals_cover_the_truth_as_often_as_they_say(
    replicates: int, requests: int, between: float, within: float, skewed: bool
) -> None:
    rng = np.random.default_rng(1)
    drawn = [interval(simulated(rng, replicates, requests, between, within, skewed), 7) for _ in range(DRAWS)]
    assert None not in drawn
    covered = sum(low <= TRUE <= high for low, high in filter(None, drawn)) / DRAWS
    assert 0.90 <= covered <= 0.99


@pytest.mark.parametrize(("replicates", "between", "within"), [(1, 0, 1), (3, 1, 0.2), (5, 0, 1)])
def test_ratios_cover_the_truth_at_least_as_often_as_they_say(
    replicates: int, between: float, within: float
) -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(DRAWS):
        pair = [simulated(rng, replicates, 20, between, within) for _ in range(2)]
        _, bounds = ratio(pair[0], pair[1])
        assert bounds is not None
        hits += bounds[0] <= 1 <= bounds[1]
    assert hits / DRAWS >= 0.93


def test_one_process_says_nothing_about_others() -> None:
    rng = np.random.default_rng(3)
    drawn = [interval(simulated(rng, 1, 50, between=1, within=0.1)) for _ in range(100)]
    assert sum(low <= TRUE <= high for low, high in filter(None, drawn)) < 50


@pytest.mark.parametrize(("percent", "fewest"), [(50, 11), (90, 64), (95, 130), (99, 662)])
def test_percentiles_need_enough_samples_to_be_bounded(percent: int, fewest: int) -> None:
    assert fewest_for(percent) == fewest
    assert upper_bound_rank(fewest - 1, percent) is None
    assert upper_bound_rank(fewest, percent) == fewest - 1


@pytest.mark.parametrize("percent", [90, 95])
def test_upper_bounds_hold(percent: int) -> None:
    rng = np.random.default_rng(4)
    rank = upper_bound_rank(200, percent)
    assert rank is not None
    bounds = np.sort(rng.uniform(size=(4000, 200)), axis=1)[:, rank - 1]
    assert 0.985 <= np.mean(bounds >= percent / 100) <= 1


@pytest.mark.parametrize("replicates", [1, 3, 5])
def test_the_upper_bound_holds_for_each_process_that_was_measured(replicates: int) -> None:
    """Processes differ by 1.7%, requests of one process by 0.2%: what is claimed is at least 99%."""
    rng = np.random.default_rng(replicates)
    z90 = 1.2815515655
    held = 0
    for _ in range(DRAWS):
        centres = rng.normal(TRUE, 0.017 * TRUE, replicates)
        drawn = centres[:, None] + 0.002 * TRUE * rng.normal(size=(replicates, 100))
        summary = summarise(Measurement(name="latency_s", samples=tuple(map(tuple, drawn.tolist()))))
        assert summary.p90 is not None
        assert summary.p90_upper is not None
        assert summary.p90 <= summary.p90_upper
        held += summary.p90_upper >= centres.max() + 0.002 * TRUE * z90
    assert held / DRAWS >= 0.985


def test_the_upper_bound_is_that_of_the_slowest_process() -> None:
    fast, slow = tuple(0.001 * i for i in range(1, 101)), tuple(0.002 * i for i in range(1, 101))
    rank = upper_bound_rank(100, 90)
    assert rank is not None
    summary = summarise(Measurement(name="latency_s", samples=(fast, slow, fast)))
    assert summary.p90_upper == slow[rank - 1]
    alone = summarise(Measurement(name="latency_s", samples=(slow,)))
    assert summary.p90_upper == alone.p90_upper


def test_a_process_with_few_requests_leaves_no_upper_bound() -> None:
    many, few = tuple(0.001 * i for i in range(1, 701)), tuple(0.001 * i for i in range(1, 101))
    summary = summarise(Measurement(name="latency_s", samples=(many, few)))
    assert None not in (summary.p90, summary.p95, summary.p99, summary.p90_upper)
    assert (summary.p95_upper, summary.p99_upper) == (None, None)
    assert summary.reason == (
        "Upper bounds of percentiles need more than the 100 requests of one process: p95 130, p99 662."
    )


def test_a_summary_of_times_has_percentiles_and_says_which_are_missing() -> None:
    rng = np.random.default_rng(5)
    summary = summarise(Measurement(name="latency_s", samples=(tuple(rng.exponential(size=200).tolist()),)))
    assert summary.p50 is not None
    assert summary.p95 is not None
    assert summary.p95_upper is not None
    assert summary.p50 < summary.p95 < summary.p95_upper
    assert (summary.p99, summary.p99_upper) == (None, None)
    assert summary.reason == "Percentiles need more than 200 requests: p99 662."
    assert (summary.n, summary.replicates, summary.better) == (200, 1, Better.LOWER)


def test_a_rate_or_a_process_s_single_number_has_no_percentiles() -> None:
    rates = summarise(Measurement(name="tokens_per_s", samples=((1.0,) * 1000,)))
    loads = summarise(Measurement(name="load_s", samples=((1.0,),) * 20))
    assert (rates.value, rates.p50, rates.reason) == (1.0, None, None)
    assert (loads.value, loads.p50, loads.reason, loads.replicates) == (1.0, None, None, 20)


def test_what_was_not_measured_is_null_with_its_reason() -> None:
    summary = summarise(Measurement(name="peak_bytes", reason="no GPU"))
    assert (summary.value, summary.ci, summary.n, summary.reason) == (None, None, 0, "no GPU")
    assert summary.unit == METRICS["peak_bytes"].unit


def test_a_replicate_without_a_number_does_not_count() -> None:
    summary = summarise(Measurement(name="compile_s", samples=((2.0,), (), (4.0,))))
    assert (summary.value, summary.n, summary.replicates) == (3.0, 2, 2)


def test_too_few_requests_of_one_process_have_no_interval() -> None:
    few = (1.0, 1.1, 0.9, 1.0, 1.0)
    assert len(few) < FEWEST_REQUESTS
    assert interval((few,)) is None
    assert relative_width(few) == math.inf
    assert ratio((few,), (few,)) == (1.0, None)
    assert relative_width((*few, 1.0)) < 1


def test_there_is_no_value_of_nothing() -> None:
    with pytest.raises(ValueError, match="no samples"):
        value_of(((), ()))
    with pytest.raises(ValueError, match="positive"):
        ratio(((1.0, 0.0),), ((1.0,),))
    with pytest.raises(ValueError, match="positive"):
        ratio((), ((1.0,),))


def test_an_interval_of_a_quantity_never_reaches_below_zero() -> None:
    bounds = interval(((0.0,), (10.0,)))
    assert bounds is not None
    assert bounds[0] == 0


def test_the_same_seed_gives_the_same_interval() -> None:
    samples = simulated(np.random.default_rng(6), 3, 20, 1, 1)
    assert interval(samples, 1) == interval(samples, 1)
    assert interval(samples[:1], 1) == interval(samples[:1], 1)
    assert ratio(samples, samples[:2], 1) == ratio(samples, samples[:2], 1)


@given(SAMPLES)
def test_values_lie_within_the_samples_and_within_their_interval(samples: Samples) -> None:
    every = [number for process in samples for number in process]
    value = value_of(samples)
    assert min(every) * (1 - 1e-12) <= value <= max(every) * (1 + 1e-12)
    bounds = interval(samples)
    assert bounds is None or bounds[0] * (1 - 1e-9) <= value <= bounds[1] * (1 + 1e-9)


@given(SAMPLES, st.sampled_from([0.25, 2.0, 1024.0]))
def test_another_unit_scales_value_and_interval(samples: Samples, scale: float) -> None:
    scaled = tuple(tuple(number * scale for number in process) for process in samples)
    assert value_of(scaled) == pytest.approx(scale * value_of(samples))
    bounds, others = interval(samples), interval(scaled)
    if bounds is None:
        assert others is None
    else:
        assert others == pytest.approx((scale * bounds[0], scale * bounds[1]))


@given(st.integers(2, 5), st.integers(1, 20), NUMBERS)
def test_what_never_varies_has_an_interval_without_width(
    replicates: int, requests: int, number: float
) -> None:
    assert interval(((number,) * requests,) * replicates) == pytest.approx((number, number))


@given(st.integers(0, 2**32 - 1), st.integers(662, 800), st.floats(0, 3))
def test_percentiles_are_ordered(seed: int, requests: int, spread: float) -> None:
    numbers = np.random.default_rng(seed).lognormal(sigma=spread, size=requests).tolist()
    summary = summarise(Measurement(name="ttft_s", samples=(tuple(numbers),)))
    found = [summary.p50, summary.p90, summary.p95, summary.p99]
    uppers = [summary.p90_upper, summary.p95_upper, summary.p99_upper]
    known = [number for number in found if number is not None]
    assert known == sorted(known)
    assert len(known) == 4
    assert all(low <= high for low, high in zip(known[1:], filter(None, uppers), strict=True))


@given(SAMPLES, SAMPLES)
def test_a_ratio_and_its_inverse_agree(ours: Samples, theirs: Samples) -> None:
    quotient, bounds = ratio(ours, theirs)
    inverse, _ = ratio(theirs, ours)
    assert quotient * inverse == pytest.approx(1)
    assert bounds is None or bounds[0] <= bounds[1]


def test_pairs_leave_out_what_disturbed_both_alike() -> None:
    slow, fast = tuple([10.0 + 0.001 * i for i in range(8)]), tuple([20.0 + 0.001 * i for i in range(8)])
    ours, theirs = (
        (slow, fast, slow),
        tuple(tuple(2 * value for value in process) for process in (slow, fast, slow)),
    )
    paired, unpaired = paired_ratio(theirs, ours), ratio(theirs, ours)
    assert paired[0] == unpaired[0] == pytest.approx(2)
    assert paired[1] is not None
    assert unpaired[1] is not None
    assert paired[1][1] - paired[1][0] < 0.01 < unpaired[1][1] - unpaired[1][0]


@pytest.mark.parametrize("replicates", [3, 5])
def test_paired_ratios_cover_the_truth_as_often_as_they_say(replicates: int) -> None:
    rng = np.random.default_rng(replicates)
    covered = 0
    for draw in range(DRAWS):
        common = rng.normal(0, 0.2, replicates)
        ours, theirs = (
            tuple(
                tuple(np.exp(math.log(level) + each + rng.normal(0, 0.02) + rng.normal(0, 0.01, 9)))
                for each in common
            )
            for level in (3.0, 2.0)
        )
        _, bounds = paired_ratio(ours, theirs, draw)
        assert bounds is not None
        covered += bounds[0] <= 1.5 <= bounds[1]
    assert covered / DRAWS > 0.9


def test_without_whole_pairs_a_ratio_is_one_of_independent_processes() -> None:
    ours, theirs = ((2.0, 2.1) * 4,), ((1.0, 1.1) * 4, (1.0, 1.2) * 4)
    assert paired_ratio(ours, theirs, 3) == ratio(ours, theirs, 3)


def test_a_summary_tells_variation_within_processes_from_that_between_them() -> None:
    summary = summarise(Measurement(name="latency_s", samples=((1.0, 1.1, 0.9), (2.0, 2.2, 1.8))))
    assert summary.mean == pytest.approx(1.5)
    assert summary.per_replicate == (1.0, 2.0)
    assert summary.cv_within == pytest.approx(0.1)
    assert summary.cv_between == pytest.approx(math.sqrt(0.5) / 1.5)
    single = summarise(Measurement(name="load_s", samples=((1.0,),)))
    assert (single.cv_within, single.cv_between) == (None, None)


def test_what_only_describes_has_quantiles_and_no_interval() -> None:
    described = describe([0.001 * i for i in range(101)])
    assert described["n"] == 101
    assert described["p50"] == pytest.approx(0.05)
    assert described["max"] == pytest.approx(0.1)
    assert described["p50"] < described["p90"] < described["p99"]
