"""Bounds of a divergence of which only some tokens are told."""

import numpy as np
import pytest

from optigpu.quality.divergence import divergence, log_probabilities
from optigpu.quality.figures import told_figures
from optigpu.quality.told import Bounded, Told, expected_by_logits, expected_by_told

VOCABULARY, POSITIONS = 400, 60
Drawn = tuple[np.ndarray, np.ndarray]


def drawn(seed: int, noise: float) -> Drawn:
    """Logits of a reference and of a server [POSITIONS, VOCABULARY], sharp at some positions and flat at others."""
    source = np.random.default_rng(seed)
    sharpness = source.uniform(0.2, 4.0, (POSITIONS, 1))
    reference = sharpness * source.normal(size=(POSITIONS, VOCABULARY))
    return reference, reference + noise * source.normal(size=(POSITIONS, VOCABULARY))


def told(logits: np.ndarray, position: int, most: int, target: int = 0) -> Told:
    """The most likely tokens, and the target, as a server rounds them."""
    logs = log_probabilities(logits)
    order = np.argsort(-logs)
    tokens = np.unique([*order[:most], target])
    return Told(position, target, tokens, np.asarray(np.float32(logs[tokens]), np.float64), int(order[0]))


def bounded(reference: np.ndarray, server: np.ndarray, most: int) -> Bounded:
    found = Bounded()
    for position, (expected, given) in enumerate(zip(reference, server, strict=True)):
        each = told(given, position, most)
        found.add(expected_by_logits(expected, each), each)
    return found


@pytest.mark.parametrize("most", [1, 5, 20, 100, VOCABULARY - 1])
@pytest.mark.parametrize("noise", [0.001, 0.1, 1.0])
def test_the_divergence_is_within_its_bounds(most: int, noise: float) -> None:
    for seed in range(10):
        reference, server = drawn(seed, noise)
        true, found = divergence(reference, server), bounded(reference, server, most)
        assert (found.low.divergences <= true + 2e-6).all()
        # What the bound from above assumes holds on average over the positions of such noise.
        assert true.mean() <= found.high.divergences.mean() + 2e-6
        assert (found.low.agreeing == (reference.argmax(1) == server.argmax(1))).all()


def test_what_the_bound_from_above_assumes_is_all_that_it_needs() -> None:
    """Of two distributions that have nothing in common, where their rests are no further apart than the ratio."""
    checked = 0
    for seed in range(200):
        source = np.random.default_rng(seed)
        expected, given = source.normal(size=(2, VOCABULARY)) * source.uniform(0.1, 5.0, (2, 1))
        each = told(given, 0, int(source.integers(1, 200)), target=int(source.integers(VOCABULARY)))
        found = Bounded()
        found.add(expected_by_logits(expected, each), each)
        p, q = log_probabilities(expected), log_probabilities(given)
        rest = np.setdiff1d(np.arange(VOCABULARY), each.tokens)
        weights = np.exp(p[rest])
        true = float(divergence(expected, given))
        assert found.low.divergences[0] <= true + 1e-6
        if (weights * (p - q)[rest]).sum() <= weights.sum() * np.log(found.ratio):
            checked += 1
            assert true <= found.high.divergences[0] + 1e-6
    assert checked > 50


def test_no_bound_from_above_holds_without_the_assumption() -> None:
    reference = np.zeros(VOCABULARY)
    server = np.where(np.arange(VOCABULARY) == VOCABULARY - 1, -60.0, 0.0)
    each = told(server, 0, 10)
    found = Bounded()
    found.add(expected_by_logits(reference, each), each)
    assert divergence(reference, server) > 0.1
    assert found.high.divergences[0] < 0.01


def test_all_tokens_give_the_divergence_itself() -> None:
    reference, server = drawn(3, 0.5)
    true, found = divergence(reference, server), bounded(reference, server, VOCABULARY)
    assert found.rest == 0
    np.testing.assert_allclose(found.low.divergences, true, atol=1e-6)
    np.testing.assert_allclose(found.high.divergences, true, atol=1e-6)


def test_the_interval_reaches_from_below_to_above() -> None:
    reference, server = drawn(1, 0.3)
    found = bounded(reference, server, 20)
    figures = told_figures(found, np.arange(POSITIONS) // 4)
    low, high = figures.intervals["kld_mean"]
    assert low < found.low.divergences.mean() <= figures.values["kld_mean"] < high
    assert low < divergence(reference, server).mean() < high
    assert "kld_mean" not in figures.without


def test_a_server_can_be_compared_with_another() -> None:
    reference, server = drawn(2, 0.3)
    found = Bounded()
    for position, (theirs, ours) in enumerate(zip(reference, server, strict=True)):
        found.add(*expected_by_told(told(theirs, position, 50), told(ours, position, 50)))
    true = divergence(reference, server)
    assert (found.low.divergences <= true + 2e-6).all()
    assert true.mean() <= found.high.divergences.mean()


def test_a_position_whose_most_likely_token_is_unknown_is_left_out() -> None:
    found, each = Bounded(), told(np.arange(5.0), 0, 3)._replace(first=None)
    found.add(expected_by_logits(np.zeros(5), each), each)
    assert (found.left_out, len(found.low)) == (1, 0)
