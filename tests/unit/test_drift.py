"""Drift within a run, and changes of level in a history: how often noise is taken for them, and what is found."""

from collections.abc import Callable

import numpy as np
import pytest

from optigpu.statistics.changes import (
    FEWEST,
    FEWEST_REQUESTS,
    SHORTEST,
    Array,
    change_points,
    discovered,
    drift,
    with_changes,
)
from optigpu.vocabulary import Better
from tests.unit.made_results import a_history, a_point

Noise = Callable[[np.random.Generator, int], Array]


def heavy_tailed(rng: np.random.Generator, n: int) -> Array:
    """Independent, widely spread, and each twentieth request hit by something long."""
    hit = (rng.random(n) < 0.05) * rng.pareto(1.5, n)
    return np.asarray(rng.lognormal(0, 0.3, n) * (1 + 3 * hit))


def correlated(rng: np.random.Generator, n: int) -> Array:
    """AR(1) with a coefficient of a half, 35% wide."""
    shocks = rng.normal(0, 0.3, n + 50)
    series = np.zeros(n + 50)
    for i in range(1, n + 50):
        series[i] = 0.5 * series[i - 1] + shocks[i]
    return np.asarray(np.exp(series[50:]))


@pytest.mark.slow
@pytest.mark.parametrize("n", [FEWEST_REQUESTS, 90, 600])
@pytest.mark.parametrize("noise", [heavy_tailed, correlated])
def test_noise_is_taken_for_drift_in_one_of_a_hundred_at_most(noise: Noise, n: int) -> None:
    rng = np.random.default_rng(0)
    alarms = sum(drift(noise(rng, n)) is not None for _ in range(2000))
    assert alarms <= 20


@pytest.mark.parametrize(
    ("course", "change"),
    [
        (lambda t: np.where(t < 0.5, 1.0, 1.3), 0.3),
        (lambda t: np.where(t < 0.5, 1.0, 0.5), -0.5),
        (lambda t: 1 + 0.5 * t, 0.29),
        (lambda t: 1 + 1.2 * (1 - np.exp(-4 * t)), 0.3),
    ],
)
def test_a_machine_that_changes_half_way_or_slowly_is_found(
    course: Callable[[Array], Array], change: float
) -> None:
    rng = np.random.default_rng(0)
    found = drift(course(np.linspace(0, 1, 120)) * rng.lognormal(0, 0.03, 120))
    assert found == pytest.approx(change, abs=0.06)


def test_a_change_of_less_than_a_quarter_is_none_however_sure_it_is() -> None:
    step = np.where(np.arange(3000) < 1500, 1.0, 1.2)
    assert drift(step) is None
    assert drift(step**2) == pytest.approx(1.2**2 - 1)


def test_a_speed_that_wanders_and_comes_back_is_no_drift() -> None:
    """What a virtual machine showed: half slower for a second or two, several times, mostly late."""
    noise = np.random.default_rng(0).lognormal(0, 0.03, 120)
    course = np.ones(120)
    course[20:30], course[80:100], course[105:120] = 1.5, 1.6, 1.4
    assert np.median(course[80:]) / np.median(course[:40]) > 1.25
    assert drift(course * noise) is None


def test_few_requests_cannot_show_drift() -> None:
    step = [1.0] * 20 + [2.0] * 10
    assert drift(step) == pytest.approx(1.0)
    assert drift(step[7:]) is None
    assert drift([]) is None


def test_a_machine_that_became_much_slower_is_found_though_few_requests_tell() -> None:
    assert drift([1.0] * 120 + [20.0] * 6) == pytest.approx(19.0)


def test_one_long_request_is_no_drift() -> None:
    assert drift([1.0] * 100 + [500.0]) is None
    assert drift([500.0] + [1.0] * 100) is None


def test_equal_values_are_no_drift() -> None:
    assert drift([1.0] * 100) is None


def test_a_series_without_a_change_has_one_in_a_twentieth_of_cases() -> None:
    random = np.random.default_rng(1)
    draws = [random.normal(size=20) for _ in range(100)] + [random.standard_t(3, size=20) for _ in range(100)]
    found = sum(bool(change_points(draw.tolist())) for draw in draws)
    assert found <= 20  # of 200, of which 10 are expected: more than 20 come in 1 of 600


def test_of_the_changes_that_are_told_of_many_series_one_in_twenty_is_of_chance() -> None:
    random = np.random.default_rng(3)
    shares = []
    for _ in range(400):
        chances = np.concatenate([random.uniform(size=80), random.uniform(0, 1e-3, size=20)])
        told = [discovered(chance, np.delete(chances, at)) for at, chance in enumerate(chances)]
        shares.append(sum(told[:80]) / max(1, sum(told)))
    assert np.mean(shares) <= 0.05
    assert np.mean(shares) > 0.02, "it does not tell only what is certain"
    assert discovered(0.04, [])
    assert not discovered(0.04, [1.0])


def test_a_step_of_three_standard_deviations_is_found_where_it_is() -> None:
    random = np.random.default_rng(2)
    places = []
    for _ in range(50):
        draw = np.concatenate([random.normal(size=12), random.normal(3, size=12)])
        places += [min(change_points(draw.tolist()), key=lambda at: abs(at - 12), default=-1)]
    assert sum(abs(at - 12) <= 1 for at in places) >= 45


@pytest.mark.parametrize(
    "values",
    [[], [1.0], [1.0] * 50, [0.0, 1.0] * (FEWEST // 2 - 1), [1.0] * 10 + [9.0] * (SHORTEST - 2) + [1.0] * 10],
)
def test_nothing_is_found_in_too_little_in_what_stands_still_or_in_an_outlier(values: list[float]) -> None:
    assert change_points(values) == ()


def test_a_change_says_by_how_much_and_which_versions_came_with_it() -> None:
    before, after = {"torch": "2.13.0", "optigpu": "0.1.0"}, {"torch": "2.14.0", "optigpu": "0.1.0"}
    points = [
        *(a_point(10.0 + number % 2, versions=before) for number in range(8)),
        *(a_point(21.0, versions=after) for _ in range(8)),
    ]
    (change,) = with_changes(a_history(*points)).changes
    assert change.ratio == pytest.approx(2.0, rel=0.01)
    assert (change.improved, change.result_id) == (True, points[8].result_id)
    assert change.versions == {"torch": ("2.13.0", "2.14.0")}
    assert not with_changes(a_history(*points, better=Better.LOWER)).changes[0].improved
    assert with_changes(a_history(*points, a_point(0.0, versions=after))).changes == ()
