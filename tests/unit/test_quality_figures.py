"""Quality figures over windows: their intervals, what they are made of, and why some have none."""

import numpy as np
import pytest

from optigpu.documents.facts import ImageQuality
from optigpu.documents.result import Measurement
from optigpu.quality.divergence import Agreement
from optigpu.quality.figures import (
    accuracy_figures,
    divergence_figures,
    perplexity_figures,
    with_windows,
)
from optigpu.quality.hellaswag import Item
from optigpu.statistics.intervals import summarise

WINDOWS = np.repeat(np.arange(10), 6)


def agreement_of(shifts: np.ndarray, order: np.ndarray) -> Agreement:
    """Positions whose logits are shifted by so much, added in the given order."""
    agreement = Agreement()
    for position in order.tolist():
        agreement.add(np.array([1.0, 0.0]), np.array([1.0 - shifts[position], 0.0]), position)
    return agreement


def test_positions_belong_to_their_windows_in_whatever_order_they_were_computed() -> None:
    rng = np.random.default_rng(0)
    shifts = rng.normal(0, 0.1 + 0.5 * (WINDOWS % 2))
    found = divergence_figures(agreement_of(shifts, rng.permutation(60)), WINDOWS)
    straight = divergence_figures(agreement_of(shifts, np.arange(60)), WINDOWS)
    assert found.intervals["kld_mean"] == pytest.approx(straight.intervals["kld_mean"])
    assert len(found.without["kld_mean"]) == 10
    for name, (low, high) in found.intervals.items():
        assert low < found.values[name] < high
    assert "kld_p99" in found.no_interval
    assert found.about["kld_standard_error"] is not None


def test_windows_that_differ_make_the_interval_wider_than_their_positions_would() -> None:
    rng = np.random.default_rng(1)
    hard = np.where(WINDOWS < 5, 0.05, 0.5) * rng.normal(1, 0.1, 60)
    mixed = rng.permutation(hard)
    wide, narrow = (
        divergence_figures(agreement_of(shifts, np.arange(60)), WINDOWS).intervals["kld_mean"]
        for shifts in (hard, mixed)
    )
    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])


def test_where_all_positions_agree_the_share_need_not_be_1() -> None:
    found = divergence_figures(agreement_of(np.zeros(60), np.arange(60)), WINDOWS)
    low, high = found.intervals["top1_agreement"]
    assert (found.values["top1_agreement"], high) == (1.0, 1.0)
    assert 0.9 < low < 0.95
    assert found.intervals["kld_mean"] == (0.0, 0.0)


def test_few_windows_have_no_interval_and_say_so() -> None:
    few = divergence_figures(agreement_of(np.ones(60), np.arange(60)), WINDOWS // 3)
    assert few.intervals == {}
    assert few.no_interval["kld_mean"] == (
        "An interval needs 5 windows, images or items; there are 4. Ask for more quality.tokens."
    )


def test_the_perplexity_s_interval_is_that_of_its_logarithm_over_windows() -> None:
    rng = np.random.default_rng(2)
    expected = -3 + rng.normal(0, 0.5, 10)[WINDOWS]
    found = perplexity_figures(expected - 0.1, expected, WINDOWS)
    nats = -(expected - 0.1).reshape(10, 6).mean(axis=1)
    half = 2.262157 * nats.std(ddof=1) / np.sqrt(10)
    assert found.intervals["perplexity"] == pytest.approx(
        tuple(np.exp(nats.mean() + each) for each in (-half, half))
    )
    low, high = found.intervals["perplexity_delta"]
    assert 0 < low < found.values["perplexity_delta"] < high
    ours, theirs = found.intervals["perplexity"], found.about["fp32_perplexity"]
    assert high - low < 0.5 * (ours[1] - ours[0]), "windows that are hard for both leave the delta alone"
    assert theirs == pytest.approx(np.exp(-expected.mean()))


def test_accuracy_and_its_loss_are_over_items() -> None:
    items = [Item("a", ("x", "y", "z", "w"), 0)] * 40
    expected = np.tile([0.0, -1.0, -1.0, -1.0], (40, 1))
    found = expected.copy()
    found[:10, 0] = -2.0
    figures = accuracy_figures(items, found.ravel(), expected.ravel())
    assert (figures.values["accuracy"], figures.values["accuracy_loss_percent"]) == (0.75, 25.0)
    low, high = figures.intervals["accuracy"]
    assert 0.5 < low < 0.75 < high < 0.9
    assert figures.intervals["accuracy_loss_percent"][0] > 0
    assert figures.about["fp32_accuracy"] == 1.0
    same = accuracy_figures(items, expected.ravel(), expected.ravel())
    assert same.values["accuracy_loss_percent"] == 0
    assert "fp32 answers otherwise" in same.no_interval["accuracy_loss_percent"]
    none = accuracy_figures(items, expected.ravel(), found.ravel() * 0 - np.tile([2.0, 1, 1, 1], 40))
    assert "answers no item correctly" in none.reasons["accuracy_loss_percent"]


def test_a_summary_has_the_interval_over_windows_or_the_reason() -> None:
    metrics = {
        name: summarise(Measurement(name=name, samples=((0.5,),)))
        for name in ("kld_mean", "kld_p99", "latency_s")
    }
    quality = ImageQuality(
        images=64, of="noise", intervals={"kld_mean": (0.4, 0.6)}, no_interval={"kld_p99": "too few"}
    )
    found = with_windows(metrics, quality)
    assert (found["kld_mean"].ci, found["kld_p99"].reason) == ((0.4, 0.6), "too few")
    assert found["latency_s"] == metrics["latency_s"]
    assert with_windows(metrics, None) == metrics
