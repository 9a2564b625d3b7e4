"""Comparing quality figures: window by window where two results have the same text."""

from typing import Any

import numpy as np
import pytest

from optigpu.documents.result import Measurement
from optigpu.documents.views import Decision
from optigpu.statistics.compare import compare
from optigpu.statistics.intervals import summarise
from optigpu.statistics.jackknife import leave_one_out, part_bounds, parts_of
from optigpu.statistics.student import Array
from tests.unit.made_results import BASELINE


def with_quality(
    divergences: Array, right: Array, expected: float = 20.0, text: str | None = "a"
) -> dict[str, Any]:
    """A stored result with quality figures over windows, made from the figures of [windows]."""
    windows = np.arange(len(divergences))
    statistics = {
        "kld_mean": lambda kept: float(divergences[kept].mean()),
        "top1_agreement": lambda kept: float(right[kept].mean()),
        "perplexity_delta": lambda kept: float(np.exp(3 + divergences[kept].mean()) - expected),
    }
    everything = np.ones(len(windows), dtype=bool)
    metrics, without = {}, {}
    for name, statistic in statistics.items():
        value = statistic(everything)
        without[name] = leave_one_out(statistic, parts_of(windows))
        summary = summarise(Measurement(name=name, samples=((value,),))).model_dump(mode="json")
        metrics[name] = summary | {"ci": part_bounds(value, without[name])}
    quality = {"tokens_sha256": text, "without_part": without, "window": 8}
    return BASELINE.model_dump(mode="json") | {"metrics": metrics, "facts": {"quality": quality}}


def test_quality_is_compared_window_by_window() -> None:
    """Windows differ far more than the two results do in any of them."""
    rng = np.random.default_rng(0)
    hard = rng.lognormal(-4, 1, 12)
    ours = with_quality(hard, 0.9 + 0.05 * rng.random(12))
    theirs = with_quality(hard * rng.normal(1.2, 0.02, 12), 0.9 + 0.05 * rng.random(12))
    found = compare(ours, theirs).metrics
    assert found["kld_mean"].ratio == pytest.approx(1.2, abs=0.02)
    assert (found["kld_mean"].decision, found["kld_mean"].paired) == (Decision.WORSE, True)
    assert found["top1_agreement"].decision is Decision.EQUIVALENT
    delta = found["perplexity_delta"]
    assert delta.ratio is None
    assert delta.difference is not None
    assert delta.difference > 0
    assert (delta.decision, delta.reason) == (Decision.WORSE, None)
    apart = compare(ours, theirs | {"facts": {"quality": {"tokens_sha256": "a"}}}).metrics["kld_mean"]
    assert (apart.decision, apart.paired) == (Decision.UNDECIDED, False)


def test_the_same_predictions_are_equal_or_equivalent() -> None:
    same = with_quality(np.linspace(0.01, 0.02, 9), np.full(9, 0.9))
    found = compare(same, same).metrics
    decisions = [found[name].decision for name in ("kld_mean", "top1_agreement", "perplexity_delta")]
    assert decisions == [Decision.EQUIVALENT, Decision.EQUIVALENT, Decision.EQUAL]
