"""Bounds of a divergence of which only some tokens are told."""

import numpy as np
import pytest

from optigpu.quality.divergence import divergence, log_probabilities
from optigpu.quality.figures import told_figures
from optigpu.quality.told import Bounded, Told, expected_by_logits
from optigpu.vocabulary import OptiGPUError

VOCABULARY, POSITIONS = 400, 60


def drawn(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a reference and of a server [POSITIONS, VOCABULARY], sharp at some positions and flat at others."""
    source = np.random.default_rng(seed)
    reference = source.uniform(0.2, 4.0, (POSITIONS, 1)) * source.normal(size=(POSITIONS, VOCABULARY))
    return reference, reference + noise * source.normal(size=(POSITIONS, VOCABULARY))


def bounded(reference: np.ndarray, server: np.ndarray, most: int, target: int = 0) -> Bounded:
    """By the most likely tokens of each row, and the target, as a server rounds them."""
    found = Bounded()
    for position, (expected, given) in enumerate(zip(reference, server, strict=True)):
        logs = log_probabilities(given)
        order = np.argsort(-logs)
        tokens = np.unique([*order[:most], target])
        told = Told(position, target, tokens, np.asarray(np.float32(logs[tokens]), np.float64), int(order[0]))
        found.add(expected_by_logits(expected, told), told)
    return found


@pytest.mark.parametrize("most", [1, 5, 20, 100, VOCABULARY - 1])
@pytest.mark.parametrize("noise", [0.001, 0.1, 1.0])
def test_the_divergence_is_within_its_bounds(most: int, noise: float) -> None:
    for seed in range(10):
        reference, server = drawn(seed, noise)
        true, found = divergence(reference, server), bounded(reference, server, most)
        assert (found.low.divergences <= true + 2e-6).all()
        assert true.mean() <= found.high.divergences.mean() + 2e-6
        low, high = told_figures(found, np.arange(POSITIONS) // 4).intervals["kld_mean"]
        assert low < true.mean() + 2e-6
        assert true.mean() < high + 2e-6
        assert (found.low.agreeing == (reference.argmax(1) == server.argmax(1))).all()


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
            assert true[position] <= high + 1e-6
    assert checked > POSITIONS / 2


def test_no_bound_from_above_holds_without_the_assumption() -> None:
    reference = np.zeros((1, VOCABULARY))
    server = np.where(np.arange(VOCABULARY) == VOCABULARY - 1, -60.0, reference)
    assert divergence(reference, server) > 0.1
    assert bounded(reference, server, 10).high.divergences[0] < 0.01


def test_what_is_no_distribution_is_refused() -> None:
    told = Told(0, 0, np.array([0, 1]), np.log([0.9, 0.3]), 0)
    with pytest.raises(OptiGPUError, match=r"add up to 1\.2000"):
        Bounded().add(expected_by_logits(np.zeros(4), told), told)


def test_all_tokens_give_the_divergence_itself() -> None:
    reference, server = drawn(3, 0.5)
    true, found = divergence(reference, server), bounded(reference, server, VOCABULARY)
    for each in (found.low, found.high):
        np.testing.assert_allclose(each.divergences, true, atol=1e-6)
