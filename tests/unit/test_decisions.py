"""How often pairs are called different, equivalent or undecided, by simulation."""

import numpy as np
import pytest

from optigpu.documents.views import Decision
from tests.unit.test_compare import beside, document, one


def decided(spread: float, change: float, seed: int) -> dict[Decision, int]:
    """How 100 pairs are decided, of 5 interleaved processes each whose medians vary by `spread`."""
    rng = np.random.default_rng(seed)
    found: dict[Decision, int] = dict.fromkeys(Decision, 0)
    for _ in range(100):
        common = 0.05 * rng.standard_normal(5)
        ours, theirs = (
            100 * level * np.exp(common + spread * rng.standard_normal(5)) for level in (1, 1 + change)
        )
        first, second = (document(tuple((float(m),) for m in side), "latency_s") for side in (ours, theirs))
        metric = one(beside(first, 0), beside(second, 1), "latency_s")
        assert metric.decision is not None
        found[metric.decision] += 1
    return found


@pytest.mark.parametrize("seed", range(3))
def test_of_equal_pairs_most_are_called_equivalent_and_few_different(seed: int) -> None:
    found = decided(0.01, 0.0, seed)
    assert found[Decision.BETTER] + found[Decision.WORSE] <= 8
    assert found[Decision.EQUIVALENT] >= 60


@pytest.mark.parametrize("seed", range(3))
def test_of_pairs_that_differ_by_5_percent_most_are_called_different(seed: int) -> None:
    found = decided(0.01, 0.05, seed)
    assert found[Decision.WORSE] >= 80
    assert found[Decision.BETTER] == 0


@pytest.mark.parametrize("seed", range(2))
def test_noisy_pairs_are_undecided_and_not_wrong(seed: int) -> None:
    found = decided(0.04, 0.0, seed)
    assert found[Decision.BETTER] + found[Decision.WORSE] <= 8
    assert found[Decision.UNDECIDED] >= 60


def test_of_equal_variants_few_are_called_different() -> None:
    """Three independent processes a side that differ by 1.7%: at most one call in twenty may be false."""
    rng = np.random.default_rng(7)
    calls = 0
    for _ in range(200):
        ours, theirs = (100 * np.exp(0.017 * rng.standard_normal(3)) for _ in range(2))
        found = one(document(tuple((float(m),) for m in ours)), document(tuple((float(m),) for m in theirs)))
        calls += found.decision in (Decision.BETTER, Decision.WORSE)
    assert calls <= 10
