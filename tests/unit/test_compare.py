"""Comparing two stored results: ratios, intervals, decisions, and what is not comparable."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optigpu.documents.result import Measurement, Samples
from optigpu.documents.views import Comparison, Decision, MetricComparison
from optigpu.statistics.compare import (
    MARGIN,
    NO_INTERVAL,
    NOT_POSITIVE,
    OTHER_TEXT,
    SINGLE_REPLICATE,
    NotComparableError,
    compare,
)
from optigpu.statistics.intervals import ratio, summarise
from tests.unit.made_results import BASELINE, INT8, WRONG

SPEED = "tokens_per_s"


def document(
    samples: Samples, name: str = SPEED, *, per_replicate: tuple[float, ...] | None = None, **changes: Any
) -> dict[str, Any]:
    """A stored result with one metric that is summarised from samples as the engine does it."""
    summary = summarise(Measurement(name=name, samples=samples)).model_dump(mode="json")
    medians = [float(np.median(process)) for process in samples]
    summary["per_replicate"] = medians if per_replicate is None else list(per_replicate)
    return BASELINE.model_dump(mode="json") | {"metrics": {name: summary}} | changes


def processes(*medians: float) -> Samples:
    """Processes with these medians and a little noise inside, seven requests each."""
    steps = np.linspace(0.999, 1.001, 7)
    return tuple(tuple((median * steps).tolist()) for median in medians)


def one(baseline: dict[str, Any], candidate: dict[str, Any], name: str = SPEED) -> MetricComparison:
    """The comparison of a single metric."""
    return compare(baseline, candidate).metrics[name]


SLOW = document(processes(100.0, 100.5, 99.5))
LATENCY = document(processes(0.100, 0.1005, 0.0995), "latency_s")


@pytest.mark.parametrize(
    ("medians", "decision"),
    [
        ((150.0, 150.5, 149.5), Decision.BETTER),
        ((50.0, 50.5, 49.5), Decision.WORSE),
        ((100.1, 99.9, 100.0), Decision.EQUIVALENT),
        ((103.0, 96.0, 101.0), Decision.UNDECIDED),
    ],
)
def test_a_rate_that_rises_is_better(medians: tuple[float, ...], decision: Decision) -> None:
    found = one(SLOW, document(processes(*medians)))
    assert found.decision is decision
    assert found.reason is None
    assert found.ratio == pytest.approx(sum(medians) / 300.0)


def test_a_time_that_falls_is_better() -> None:
    quicker = document(processes(0.050, 0.0505, 0.0495), "latency_s")
    assert one(LATENCY, quicker, "latency_s").decision is Decision.BETTER
    assert one(quicker, LATENCY, "latency_s").decision is Decision.WORSE


def test_a_real_difference_within_the_margin_is_equivalent() -> None:
    """One percent, known to a thousandth: the interval excludes 1, and the difference is too small to matter."""
    found = one(document(processes(100.0, 100.01, 99.99)), document(processes(101.0, 101.01, 100.99)))
    assert found.ci is not None
    assert 1 < found.ci[0] < found.ci[1] < 1 + MARGIN
    assert found.decision is Decision.EQUIVALENT


def test_the_interval_is_that_of_the_statistics_over_processes() -> None:
    """From the summaries alone: exactly what the processes' medians as samples would give."""
    medians = (110.0, 118.0, 114.0)
    expected = ratio(tuple((m,) for m in medians), ((100.0,), (100.5,), (99.5,)))
    found = one(SLOW, document(processes(*medians)))
    assert found.ratio == pytest.approx(expected[0])
    assert found.ci == expected[1]


def test_processes_that_are_exactly_alike_are_equivalent() -> None:
    same = document(((4.0,), (4.0,), (4.0,)), "weight_bytes")
    found = one(same, same, "weight_bytes")
    assert (found.ratio, found.ci, found.decision) == (1.0, (1.0, 1.0), Decision.EQUIVALENT)


def test_one_process_gives_an_interval_and_decides_nothing() -> None:
    alone = document(processes(300.0))
    for pair in ((SLOW, alone), (alone, SLOW), (alone, document(processes(100.0)))):
        found = one(*pair)
        assert (found.decision, found.reason) == (Decision.UNDECIDED, SINGLE_REPLICATE)
        assert found.ratio is not None
        assert found.ci is not None
        assert found.ci[0] < found.ratio < found.ci[1]


def test_a_summary_of_before_there_were_medians_in_it_is_compared_by_its_interval() -> None:
    old = document(processes(200.0, 201.0, 199.0), per_replicate=())
    found = one(SLOW, old)
    new = one(SLOW, document(processes(200.0, 201.0, 199.0)))
    assert found.decision is Decision.BETTER
    assert found.ci == pytest.approx(new.ci, rel=0.01)


def test_without_medians_the_interval_is_as_wide_as_both_together() -> None:
    def with_interval(value: float, low: float, high: float) -> dict[str, Any]:
        made = document(processes(value, value), per_replicate=())
        made["metrics"][SPEED] |= {"value": value, "ci": [low, high]}
        return made

    found = one(with_interval(100, 90, 115), with_interval(200, 190, 205))
    below = np.hypot(np.log(200 / 190), np.log(115 / 100))
    above = np.hypot(np.log(205 / 200), np.log(100 / 90))
    assert found.ci == pytest.approx((2 * np.exp(-below), 2 * np.exp(above)))


def test_a_figure_that_was_read_once_has_a_ratio_and_no_interval() -> None:
    found = one(document(((4.0,),), "weight_bytes"), document(((1.0,),), "weight_bytes"), "weight_bytes")
    assert (found.ratio, found.ci) == (0.25, None)
    assert (found.decision, found.reason) == (Decision.UNDECIDED, SINGLE_REPLICATE)


def test_an_interval_that_reaches_zero_gives_none_of_the_ratio() -> None:
    wide = document(processes(1.0, 1.0, 1.0), per_replicate=())
    wide["metrics"][SPEED]["ci"] = [0.0, 2.0]
    found = one(SLOW, wide)
    assert (found.ci, found.decision, found.reason) == (None, Decision.UNDECIDED, NO_INTERVAL)


def test_a_metric_without_a_value_keeps_its_reason() -> None:
    found = compare(BASELINE.model_dump(mode="json"), INT8.model_dump(mode="json")).metrics["ttft_s"]
    assert (found.ratio, found.ci, found.decision) == (None, None, None)
    assert found.reason == "candidate: the first token came with the second"
    energy = document(((1.0,),), "j_per_token")
    energy["metrics"]["j_per_token"] |= {"value": None, "reason": "no counter"}
    assert one(energy, energy, "j_per_token").reason == "both: no counter"


@pytest.mark.parametrize("value", [0.0, -0.5])
def test_what_is_not_above_zero_has_no_ratio(value: float) -> None:
    delta = document(((value,), (1.0,)), "perplexity_delta")
    found = one(delta, document(((1.0,), (1.0,)), "perplexity_delta"), "perplexity_delta")
    assert (found.ratio, found.decision, found.reason) == (None, None, NOT_POSITIVE)


def test_only_metrics_that_both_have_are_compared_and_the_primary_one_comes_first() -> None:
    baseline, wrong = BASELINE.model_dump(mode="json"), WRONG.model_dump(mode="json")
    found = compare(baseline, wrong)
    assert list(found.metrics) == [SPEED, "weight_bytes"]
    assert found.primary_metric == SPEED
    baseline["variant"]["primary_metric"] = "weight_bytes"
    assert list(compare(baseline, wrong).metrics) == ["weight_bytes", SPEED]


def test_an_invalid_side_is_compared_with_a_note() -> None:
    found = compare(BASELINE.model_dump(mode="json"), WRONG.model_dump(mode="json"))
    assert (found.baseline.valid, found.candidate.valid) == (True, False)
    assert found.notes == ("The candidate is not valid: output_invalid.",)


def test_another_unit_is_no_ratio() -> None:
    other = document(processes(1.0, 1.0))
    other["metrics"][SPEED]["unit"] = "1/min"
    assert "1/min" in (one(SLOW, other).reason or "")


def changed(part: str, **fields: Any) -> dict[str, Any]:
    """SLOW with other fields in one of its parts."""
    return SLOW | {part: SLOW[part] | fields}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            changed("variant", workload_digest="x", workload={"kind": "generate", "new_tokens": 8}),
            "workloads",
        ),
        (changed("environment", hardware_class="1x GPU"), "hardware differs: 2x Test CPU and 1x GPU"),
        (SLOW | {"source": "device"}, "sources differ: worker and device"),
    ],
)
def test_what_does_not_compare_is_refused_unless_it_is_wanted(other: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotComparableError, match=sentence):
        compare(SLOW, other)
    found = compare(SLOW, other, anyway=True)
    assert sentence in found.notes[0]
    assert found.metrics[SPEED].ratio == 1.0


def test_what_differs_in_the_environment_is_listed() -> None:
    other = changed("environment", host_id="another", software={"torch": "2.14.0", "numpy": "2.4"})
    other |= {"seed": 7, "provenance": {"git": "abc"}}
    found = {each.field: (each.baseline, each.candidate) for each in compare(SLOW, other).differences}
    assert found == {
        "environment.host_id": ("made-up", "another"),
        "environment.software.torch": ("2.13.0", "2.14.0"),
        "environment.software.numpy": (None, "2.4"),
        "provenance.git": (None, "abc"),
        "seed": (0, 7),
    }


@pytest.mark.parametrize(
    ("broken", "place"),
    [
        ({}, "id"),
        (SLOW | {"metrics": {SPEED: {"value": "fast"}}}, f"metrics.{SPEED}"),
        (SLOW | {"metrics": 7}, "metrics"),
        (SLOW | {"variant": None}, "variant"),
    ],
)
def test_a_document_that_is_no_result_is_one_sentence(broken: dict[str, Any], place: str) -> None:
    with pytest.raises(NotComparableError, match=rf"^The candidate cannot be read as a result \({place}"):
        compare(SLOW, broken, anyway=True)


def test_quality_on_different_texts_has_no_ratio_and_speed_has_one() -> None:
    def on(text: str | None) -> dict[str, Any]:
        made = document(((0.9,), (0.9,)), "top1_agreement")
        made["metrics"] |= SLOW["metrics"]
        return made | {"facts": {"quality": {"tokens_sha256": text, "window": 8}}}

    same = compare(on("a"), on("a")).metrics
    assert (same["top1_agreement"].ratio, same["top1_agreement"].reason) == (1.0, None)
    other = compare(on("a"), on("b")).metrics
    assert (other["top1_agreement"].ratio, other["top1_agreement"].reason) == (None, OTHER_TEXT)
    assert other[SPEED].ratio == 1.0


def test_fields_that_nobody_knows_yet_do_no_harm() -> None:
    later = SLOW | {"invented": 1, "metrics": {SPEED: SLOW["metrics"][SPEED] | {"invented": [1]}}}
    assert one(later, SLOW).ratio == 1.0


def test_a_comparison_is_a_document() -> None:
    found = compare(SLOW, changed("environment", software={}))
    assert Comparison.model_validate_json(json.dumps(found.model_dump(mode="json"))) == found


medians = st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=6)


@given(medians, medians)
def test_turned_round_the_decision_is_turned_round(ours: list[float], theirs: list[float]) -> None:
    forth = one(document(tuple((m,) for m in ours)), document(tuple((m,) for m in theirs)))
    back = one(document(tuple((m,) for m in theirs)), document(tuple((m,) for m in ours)))
    assert forth.ratio is not None
    assert back.ratio is not None
    assert forth.ratio * back.ratio == pytest.approx(1)
    assert forth.ci is not None
    assert forth.ci[0] <= forth.ci[1]
    # The resamples are drawn anew, so that only what is far from a boundary must turn round exactly.
    if forth.ci[0] > 1.5 or forth.ci[1] < 1 / 1.5:
        turned = {Decision.BETTER: Decision.WORSE, Decision.WORSE: Decision.BETTER}
        assert back.decision is turned[forth.decision or Decision.UNDECIDED]


def test_of_equal_variants_few_are_called_different() -> None:
    """Three processes a side that differ by 1.7%, as processes do: at most one call in twenty may be false."""
    rng = np.random.default_rng(7)
    calls = 0
    for _ in range(200):
        ours, theirs = (100 * np.exp(0.017 * rng.standard_normal(3)) for _ in range(2))
        found = one(document(tuple((float(m),) for m in ours)), document(tuple((float(m),) for m in theirs)))
        calls += found.decision in (Decision.BETTER, Decision.WORSE)
    assert calls <= 10
