"""Comparing two stored results: ratios, intervals, decisions, and what is not comparable."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optigpu.documents.result import Measurement, Samples
from optigpu.documents.views import Decision, MetricComparison
from optigpu.statistics.compare import (
    MARGIN,
    NO_INTERVAL,
    OTHER_TEXT,
    NotComparableError,
    compare,
)
from optigpu.statistics.estimates import t_quantile
from optigpu.statistics.intervals import paired_ratio, ratio, summarise
from tests.known import known
from tests.unit.made_results import BASELINE, INT8

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
    """Processes with these medians and a little noise inside, 25 requests each."""
    steps = np.random.default_rng(0).permutation(np.linspace(0.999, 1.001, 25))
    return tuple(tuple((median * steps).tolist()) for median in medians)


def beside(stored: dict[str, Any], index: int, factors: Sequence[float] = ()) -> dict[str, Any]:
    """The same as a variant of a job whose variants 0 and 1 were measured side by side. By their turns its figures are
    so many times the other's, process by process."""
    facts = stored["facts"] | {"side_by_side": [0, 1]}
    found = {"beside": {str(1 - index): list(factors)} if factors else {}}
    metrics = {name: summary | found for name, summary in stored["metrics"].items()}
    variant = stored["variant"] | {"index": index}
    return stored | {"job_id": "j", "variant": variant, "facts": facts, "metrics": metrics}


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
    expected = math.prod(medians) / (100.0 * 100.5 * 99.5)
    assert found.ratio == pytest.approx(expected ** (1 / 3))


def disturbed(stored: dict[str, Any], bound: float | None) -> dict[str, Any]:
    """The same, of whose speed disturbances can have cost so much."""
    metrics = {name: summary | {"cost_bound": bound} for name, summary in stored["metrics"].items()}
    return stored | {"metrics": metrics}


@pytest.mark.parametrize(
    ("baseline", "candidate", "decision"),
    [
        (SLOW, disturbed(document(processes(80.0, 80.5, 79.5)), 0.25), Decision.UNDECIDED),
        (SLOW, disturbed(document(processes(80.0, 80.5, 79.5)), 0.15), Decision.WORSE),
        (SLOW, disturbed(document(processes(100.1, 99.9, 100.0)), 0.25), Decision.UNDECIDED),
        (disturbed(SLOW, 0.25), document(processes(150.0, 150.5, 149.5)), Decision.BETTER),
        (disturbed(SLOW, 0.40), document(processes(150.0, 150.5, 149.5)), Decision.UNDECIDED),
        (disturbed(SLOW, 0.25), document(processes(90.0, 90.5, 89.5)), Decision.WORSE),
    ],
)
def test_what_disturbances_can_have_cost_may_explain_a_difference(
    baseline: dict[str, Any], candidate: dict[str, Any], decision: Decision
) -> None:
    assert one(baseline, candidate).decision is decision


def test_a_disturbed_time_reaches_towards_shorter_ones_and_only_so_far() -> None:
    plain = one(LATENCY, document(processes(0.120, 0.1205, 0.1195), "latency_s"), "latency_s")
    late = disturbed(document(processes(0.120, 0.1205, 0.1195), "latency_s"), 0.25)
    found = one(LATENCY, late, "latency_s")
    assert found.ci == pytest.approx((known(plain.ci)[0] * 0.75, known(plain.ci)[1]))
    assert (plain.decision, found.decision) == (Decision.WORSE, Decision.UNDECIDED)


def test_a_disturbance_without_a_bound_leaves_no_interval() -> None:
    found = one(SLOW, disturbed(document(processes(150.0, 150.5, 149.5)), None))
    assert (found.decision, found.ci, found.reason) == (Decision.UNDECIDED, None, NO_INTERVAL)


def test_processes_that_took_turns_shared_what_disturbed_them() -> None:
    sides = beside(SLOW, 0), beside(document(processes(110.0, 110.5, 109.5)), 1)
    assert one(sides[0], disturbed(sides[1], 0.25)) == one(*sides)


def test_a_real_difference_within_the_margin_is_equivalent() -> None:
    """One percent, known to a thousandth: the interval excludes 1, and the difference is too small to matter."""
    found = one(document(processes(100.0, 100.01, 99.99)), document(processes(101.0, 101.01, 100.99)))
    assert 1 < known(found.ci)[0] < known(found.ci)[1] < 1 + MARGIN
    assert found.decision is Decision.EQUIVALENT


def test_the_interval_is_that_of_the_statistics_over_processes() -> None:
    """From the summaries alone: exactly what the processes' medians as samples would give."""
    medians = (110.0, 118.0, 114.0)
    expected = ratio(tuple((m,) for m in medians), ((100.0,), (100.5,), (99.5,)))
    found = one(SLOW, document(processes(*medians)))
    assert found.ratio == pytest.approx(expected[0])
    assert found.ci == pytest.approx(expected[1])
    assert not found.paired


def test_two_results_of_one_job_side_by_side_are_compared_in_pairs() -> None:
    """What slows both of a pair down leaves their ratio alone, whatever the order of the processes."""
    slow, fast = (100.0, 80.0, 125.0), (150.0, 121.0, 187.0)
    ours, theirs = document(processes(*slow)), document(processes(*fast))
    paired = one(beside(ours, 0), beside(theirs, 1))
    expected = paired_ratio(tuple((m,) for m in fast), tuple((m,) for m in slow))
    assert paired.paired
    assert paired.ci == pytest.approx(expected[1])
    assert paired.decision is Decision.BETTER
    apart = one(ours, theirs)
    assert (apart.paired, apart.decision) == (False, Decision.UNDECIDED)
    elsewhere = beside(theirs, 1) | {"job_id": "another"}
    assert one(beside(ours, 0), elsewhere).ci == apart.ci


def test_the_ratio_of_two_that_took_turns_is_that_of_their_turns() -> None:
    """Their medians say next to nothing: the machine changed its speed between the rounds."""
    ours, theirs = document(processes(100.0, 60.0, 140.0)), document(processes(70.0, 130.0, 90.0))
    factors = (1.100, 1.101, 1.099)
    found = one(beside(ours, 0, [1 / factor for factor in factors]), beside(theirs, 1, factors))
    centre, half = np.mean(np.log(factors)), t_quantile(0.975, 2) * np.std(np.log(factors), ddof=1) / 3**0.5
    assert found.ratio == pytest.approx(np.exp(centre))
    assert found.ci == pytest.approx((np.exp(centre - half), np.exp(centre + half)))
    assert (found.paired, found.decision, found.reason) == (True, Decision.BETTER, None)
    turned = one(beside(theirs, 1, factors), beside(ours, 0, [1 / factor for factor in factors]))
    assert turned.ratio == pytest.approx(1 / np.exp(centre))
    assert turned.decision is Decision.WORSE
    from_medians = one(beside(ours, 0), beside(theirs, 1))
    assert from_medians.ratio == pytest.approx((70 * 130 * 90 / (100 * 60 * 140)) ** (1 / 3))
    assert (from_medians.paired, from_medians.decision) == (True, Decision.UNDECIDED)


def test_turns_count_only_between_two_of_one_job() -> None:
    ours, theirs = beside(SLOW, 0), beside(document(processes(110.0, 110.5, 109.5)), 1, (2.0, 2.0, 2.1))
    elsewhere = one(ours, theirs | {"job_id": "another"})
    assert elsewhere.ratio == pytest.approx(1.1, rel=0.001)
    assert not elsewhere.paired


@pytest.mark.parametrize(
    ("bytes_", "decision"), [(4.0, Decision.EQUAL), (3.999, Decision.BETTER), (4.001, Decision.WORSE)]
)
def test_what_is_counted_is_compared_exactly_even_from_single_processes(
    bytes_: float, decision: Decision
) -> None:
    found = one(document(((4.0,),), "weight_bytes"), document(((bytes_,),), "weight_bytes"), "weight_bytes")
    assert (found.ratio, found.ci, found.exact) == (bytes_ / 4, None, True)
    assert (found.decision, found.reason) == (decision, None)


def test_a_single_process_with_few_requests_decides_nothing_and_says_why() -> None:
    few = document((tuple(range(100, 107)),))
    found = one(few, document((tuple(range(500, 507)),)))
    assert found.ratio == pytest.approx(503 / 103)
    assert (found.ci, found.decision) == (None, Decision.UNDECIDED)
    assert "24 requests of one; there is one process with 7" in (found.reason or "")


def test_a_summary_of_before_there_were_medians_in_it_is_compared_by_its_interval() -> None:
    old = document(processes(200.0, 201.0, 199.0), per_replicate=())
    found = one(SLOW, old)
    new = one(SLOW, document(processes(200.0, 201.0, 199.0)))
    assert found.decision is Decision.BETTER
    assert found.ci == pytest.approx(new.ci, rel=0.01)


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
def test_what_is_not_above_zero_is_compared_by_its_difference(value: float) -> None:
    name = "energy_j"
    ours, theirs = document(((value,), (value + 0.1,)), name), document(((9.0,), (9.1,)), name)
    found = one(ours, theirs, name)
    assert found.ratio is None
    assert found.difference == pytest.approx(9.0 - value, abs=0.001)
    assert known(found.ci)[0] < known(found.difference) < known(found.ci)[1]
    assert found.decision is Decision.WORSE
    assert one(ours, ours, name).decision is Decision.UNDECIDED


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


medians = st.floats(1e-3, 1e6)


@given(st.lists(st.tuples(medians, medians), min_size=2, max_size=6))
def test_turned_round_the_decision_is_turned_round(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    forth = one(document(tuple((m,) for m in ours)), document(tuple((m,) for m in theirs)))
    back = one(document(tuple((m,) for m in theirs)), document(tuple((m,) for m in ours)))
    assert known(forth.ratio) * known(back.ratio) == pytest.approx(1)
    assert known(forth.ci)[0] <= known(forth.ci)[1]
    turned = {Decision.BETTER: Decision.WORSE, Decision.WORSE: Decision.BETTER}
    assert back.decision is turned.get(forth.decision or Decision.UNDECIDED, forth.decision)
