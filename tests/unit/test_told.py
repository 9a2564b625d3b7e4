"""Bounds of a divergence of which only some tokens are told."""

import numpy as np
import pytest

from optigpu.quality.divergence import divergence, log_probabilities
from optigpu.quality.figures import told_figures
from optigpu.quality.told import SUMMING, Bounded, Told, expected_by_logits
from optigpu.vocabulary import OptiGPUError

VOCABULARY, POSITIONS = 400, 60


def drawn(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a reference and of a server [POSITIONS, VOCABULARY], sharp at some positions and flat at others."""
    source = np.random.default_rng(seed)
    reference = source.uniform(0.2, 4.0, (POSITIONS, 1)) * source.normal(size=(POSITIONS, VOCABULARY))
    server = reference + noise * source.normal(size=(POSITIONS, VOCABULARY))
    return reference.astype(np.float32).astype(np.float64), server.astype(np.float32).astype(np.float64)


def float32_logs(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities as llama-server computes them: one sum in float32, in the order of the tokens."""
    given = np.float32(logits)
    weights = np.exp(given - given.max())
    return np.asarray(np.log(weights / np.cumsum(weights)[-1]), np.float64)


def bounded(reference: np.ndarray, server: np.ndarray, most: int, target: int = 0) -> Bounded:
    """By the most likely tokens of each row, and the target, as a server rounds them."""
    found, common = Bounded(), reference.shape[1] * SUMMING
    for position, (expected, given) in enumerate(zip(reference, server, strict=True)):
        logs = float32_logs(given)
        order = np.argsort(-logs)
        tokens = np.unique([*order[:most], target])
        told = Told(position, target, tokens, logs[tokens], int(order[0]), common)
        found.add(expected_by_logits(expected, told), told)
    return found


@pytest.mark.parametrize("most", [1, 5, 20, 100, VOCABULARY - 1])
@pytest.mark.parametrize("noise", [0.001, 0.1, 1.0])
def test_the_divergence_is_within_its_bounds(most: int, noise: float) -> None:
    for seed in range(10):
        reference, server = drawn(seed, noise)
        true, found = divergence(reference, server), bounded(reference, server, most)
        assert (found.low.divergences <= true).all()
        assert true.mean() <= found.high.divergences.mean()
        low, high = told_figures(found, np.arange(POSITIONS) // 4).intervals["kld_mean"]
        assert low < true.mean() < high
        assert (found.low.agreeing == (reference.argmax(1) == server.argmax(1))).all()


@pytest.mark.parametrize("tail", [0.7, 0.3, 1e-2, 1e-4, 5e-8])
@pytest.mark.parametrize("shift", [0.0, 1e-3, 0.1])
def test_a_sum_in_float32_that_is_wrong_makes_no_divergence(tail: float, shift: float) -> None:
    """Of many small equal terms each is rounded in the same direction, or lost."""
    server = np.where(np.arange(60_000) < 20, 0.0, np.float32(np.log(tail)))[None]
    reference = server + shift * (np.arange(60_000) < 10)
    exact = log_probabilities(server[0])
    assert np.abs(float32_logs(server[0]) - exact).max() < 60_000 * SUMMING + 1e-5
    true = divergence(reference, server)
    for most in (20, 2000, 59_999):
        found = bounded(reference, server, most)
        assert found.low.divergences <= true <= found.high.divergences


def test_the_bound_from_above_needs_what_it_assumes_and_no_more() -> None:
    """At each position where the mean over the rest is no larger than that."""
    reference, server = drawn(5, 2.0)
    found, true = bounded(reference, server, 20), divergence(reference, server)
    checked = 0
    for position, high in enumerate(found.high.divergences):
        p, q = log_probabilities(reference[position]), log_probabilities(server[position])
        rest = np.setdiff1d(np.arange(VOCABULARY), [*np.argsort(-q)[:20], 0])
        weights = np.exp(p[rest])
        if (weights * (p - q)[rest]).sum() <= weights.sum() * found.assumed:
            checked += 1
            assert true[position] <= high
    assert checked > POSITIONS / 2


def test_no_bound_from_above_holds_without_the_assumption() -> None:
    reference = np.zeros((1, VOCABULARY))
    server = np.where(np.arange(VOCABULARY) == VOCABULARY - 1, -60.0, reference)
    assert divergence(reference, server) > 0.1
    assert bounded(reference, server, 10).high.divergences[0] < 0.01


def test_what_is_no_distribution_is_refused() -> None:
    told = Told(0, 0, np.array([0, 1]), np.log([0.9, 0.3]), 0, 1e-3)
    with pytest.raises(OptiGPUError, match=r"add up to 1\.2000"):
        Bounded().add(expected_by_logits(np.zeros(4), told), told)


def test_all_tokens_give_the_divergence_itself() -> None:
    reference, server = drawn(3, 0.5)
    true, found = divergence(reference, server), bounded(reference, server, VOCABULARY)
    for each in (found.low, found.high):
        np.testing.assert_allclose(each.divergences, true, atol=VOCABULARY * SUMMING + 3e-5)
