"""Which technique bought what, from outcomes whose gains are known."""

import math
import statistics
from typing import Any

import pytest

from optigpu.documents.facts import RunFacts
from optigpu.documents.result import (
    OF_THE_OUTPUT,
    Attribution,
    AttributionRow,
    Environment,
    Measurement,
    Outcome,
    Result,
    VariantSummary,
    Verdict,
    VerdictReason,
)
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.statistics.estimates import t_quantile
from optigpu.statistics.intervals import summarise
from optigpu.vocabulary import VariantStatus, new_id, utc_now
from tests.known import known

HERE = Environment(hardware_class="c", host_id="h", cpu_model="m", cpu_cores=2, memory_bytes=1, os="o")
PROCESS = tuple(1 + 0.01 * math.sin(7 * i * i) for i in range(25))


def job(*stack: str, plan: str = "ladder", **changes: Any) -> JobSpec:
    document = {"workload": {"kind": "generate"}, "model": "preset:gpt2", "plan": plan}
    named = [{"name": name} for name in stack]
    return JobSpec.model_validate(document | {"stack": named} | changes)


def measured(
    variant: Variant,
    speed: float,
    *reasons: VerdictReason,
    metric: str = "tokens_per_s",
    beside: tuple[int, ...] = (),
    cost: float | None = 0.0,
) -> Outcome:
    """A variant that was not valid for these reasons and took turns with those in `beside`; what disturbed it can have
    cost that share of its speed."""
    result = Result(
        id=new_id(),
        created_at=utc_now(),
        variant=VariantSummary(
            **variant.model_dump(include={"index", "role", "label", "model", "backend", "device"}),
            workload={},
            stack=(),
            workload_digest=variant.workload_digest,
            variant_digest=variant.digest,
            primary_metric=metric,
        ),
        verdict=Verdict(
            valid=not reasons,
            reasons=reasons,
            notes=("A token is missing.",) if reasons else (),
            cost_bound=cost,
        ),
        metrics={},
        facts=RunFacts(side_by_side=beside),
        environment=HERE,
        seed=0,
    )
    samples = {metric: (tuple(speed * number for number in PROCESS),)}
    return Outcome(index=variant.index, status=VariantStatus.SUCCEEDED, result=result, samples=samples)


def unsupported(variant: Variant) -> Outcome:
    return Outcome(index=variant.index, status=VariantStatus.UNSUPPORTED, reason="no compiler")


def attributed(
    spec: JobSpec, speeds: dict[str, float | None]
) -> tuple[Attribution, dict[str, AttributionRow]]:
    """The attribution for speeds by label, None for an unsupported variant; labels that are not named are left out."""
    variants = [variant for variant in variants_of(spec) if variant.label in speeds]
    assert len(variants) == len(speeds)
    outcomes = {}
    for variant in variants:
        speed = speeds[variant.label]
        outcomes[variant.index] = unsupported(variant) if speed is None else measured(variant, speed)
    attribution = attribute(spec, variants_of(spec), outcomes)
    return attribution, {row.label: row for row in attribution.rows}


def gains(row: AttributionRow) -> tuple[float | None, float | None, float | None]:
    found = (row.speedup, row.alone, row.added)
    return tuple(round(gain.ratio, 6) if gain else None for gain in found)  # type: ignore[return-value]


def test_each_rung_is_compared_with_the_baseline_and_with_the_rung_before() -> None:
    attribution, rows = attributed(
        job("bf16", "int8_weight_only"),
        {"baseline": 10, "bf16": 20, "int8_weight_only": 5, "bf16 + int8_weight_only": 50},
    )
    assert gains(rows["baseline"]) == (None, None, None)
    assert gains(rows["bf16"]) == (2, 2, 2)
    assert gains(rows["int8_weight_only"]) == (0.5, 0.5, None)
    assert gains(rows["bf16 + int8_weight_only"]) == (5, None, 2.5)
    assert [row.technique for row in attribution.rows] == [
        None,
        "bf16",
        "int8_weight_only",
        "int8_weight_only",
    ]
    assert attribution.best == rows["bf16 + int8_weight_only"].index
    assert attribution.metric == "tokens_per_s"


def test_a_rung_after_an_unsupported_one_is_compared_with_the_last_that_was_measured() -> None:
    _, rows = attributed(
        job("bf16", "int8_weight_only", "static_kv_cache"),
        {
            "baseline": 10,
            "bf16": 20,
            "int8_weight_only": None,
            "static_kv_cache": 10,
            "bf16 + int8_weight_only": None,
            "bf16 + int8_weight_only + static_kv_cache": 30,
        },
    )
    last = known(rows["bf16 + int8_weight_only + static_kv_cache"].added)
    assert (round(last.ratio, 6), last.compared_with) == (1.5, rows["bf16"].index)
    assert rows["bf16 + int8_weight_only"].status is VariantStatus.UNSUPPORTED
    assert gains(rows["bf16 + int8_weight_only"]) == (None, None, None)


def test_a_rung_that_adds_nothing_new_adds_no_gain() -> None:
    _, rows = attributed(
        job("torch_compile", "static_kv_cache", "bf16"),
        {
            "baseline": 10,
            "static_kv_cache + torch_compile": 40,
            "static_kv_cache": 20,
            "bf16": 10,
            "bf16 + static_kv_cache + torch_compile": 60,
        },
    )
    assert gains(rows["static_kv_cache + torch_compile"]) == (4, 4, 4)
    assert gains(rows["static_kv_cache"]) == (2, 2, None)
    assert gains(rows["bf16 + static_kv_cache + torch_compile"]) == (6, None, 1.5)


def test_what_is_beside_a_single_variant_is_compared_with_it() -> None:
    beside = [{"backend": "llama_cpp", "stack": [{"name": "gguf"}], "label": "llama.cpp"}]
    attribution, rows = attributed(job("bf16", plan="single", beside=beside), {"bf16": 20, "llama.cpp": 50})
    assert gains(rows["llama.cpp"]) == (2.5, None, None)
    assert gains(rows["bf16"]) == (None, None, None)
    assert attribution.best == 1


def test_another_backend_s_baseline_is_not_the_job_s() -> None:
    spec = job("bf16", beside=[{"backend": "llama_cpp"}])
    _, rows = attributed(spec, {"baseline": 10, "bf16": 20, "llama_cpp: baseline": 40})
    assert gains(rows["baseline"]) == (None, None, None)
    assert gains(rows["bf16"]) == (2, 2, 2)
    assert gains(rows["llama_cpp: baseline"]) == (4, None, None)


def took_turns(factors: tuple[float, ...], *, together: bool = True) -> AttributionRow:
    """A variant of twice the baseline's speed by its processes' medians, and of so many times it by their turns."""
    spec, metric = job("bf16"), "tokens_per_s"
    variants = variants_of(spec)
    side_by_side = (0, 1) if together else ()
    outcomes = {}
    for variant, figure, of_turns in zip(variants, (10.0, 20.0), ({}, {0: factors}), strict=True):
        outcome = measured(variant, figure, beside=side_by_side)
        samples = {metric: outcome.samples[metric] * len(factors)}
        summary = summarise(Measurement(name=metric, samples=samples[metric]))
        metrics = {metric: summary.model_copy(update={"beside": of_turns})}
        result = known(outcome.result).model_copy(update={"metrics": metrics})
        outcomes[variant.index] = outcome.model_copy(update={"result": result, "samples": samples})
    return attribute(spec, variants, outcomes).rows[1]


def test_the_gain_of_a_variant_that_took_turns_is_that_of_its_turns() -> None:
    factors = (1.50, 1.52, 1.48)
    gain = took_turns(factors).speedup
    expected = statistics.geometric_mean(factors)
    assert known(gain).ratio == pytest.approx(expected)
    half = t_quantile(0.975, 2) * statistics.stdev(map(math.log, factors)) / math.sqrt(3)
    assert known(gain).ci == pytest.approx((expected * math.exp(-half), expected * math.exp(half)))
    apart = known(took_turns(factors, together=False).speedup)
    assert apart.ratio == pytest.approx(2)


DISTURBANCES = [reason for reason in VerdictReason if reason not in OF_THE_OUTPUT]


def two(
    speeds: tuple[float, float] = (10.0, 20.0),
    reasons: tuple[tuple[VerdictReason, ...], ...] = ((), ()),
    costs: tuple[float | None, float | None] = (0.0, 0.0),
    *,
    together: bool = True,
    **again: Any,
) -> Attribution:
    """A baseline and a variant: their speeds, why they are not valid, and what the disturbances can have cost."""
    spec = job("bf16")
    variants = variants_of(spec)
    outcomes = {
        variant.index: measured(
            variant, speed, *why, beside=(0, 1) if together else (variant.index,), cost=cost
        )
        for variant, speed, why, cost in zip(variants, speeds, reasons, costs, strict=True)
    }
    return attribute(spec, variants, outcomes, **again)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("reason", VerdictReason)
def test_a_ratio_is_always_there_and_has_a_verdict_of_its_own(
    reason: VerdictReason, together: bool, which: int
) -> None:
    """Turns share a disturbance, and a wrong output is wrong in any company."""
    reasons = ((reason,), ()) if which == 0 else ((), (reason,))
    row = two(reasons=reasons, together=together).rows[1]
    assert gains(row) == (2, 2, 2)
    holds = together and reason in DISTURBANCES
    assert known(row.speedup).reasons == (() if holds else (reason,))
    assert known(row.speedup).valid is holds


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("costs", "low", "high"),
    [((0.0, 0.0), 1.0, 1.0), ((0.2, 0.0), 0.8, 1.0), ((0.0, 0.5), 1.0, 2.0), ((0.2, 0.5), 0.8, 2.0)],
)
def test_a_ratio_reaches_to_where_either_side_alone_would_be_undisturbed(
    costs: tuple[float, float], low: float, high: float, together: bool
) -> None:
    reached, quiet = (ratio_of_two(each, together) for each in (costs, (0.0, 0.0)))
    assert known(reached) == pytest.approx((low * known(quiet)[0], high * known(quiet)[1]))


@pytest.mark.parametrize("costs", [(None, 0.0), (0.0, None)])
def test_without_a_bound_of_the_cost_a_ratio_has_no_interval(
    costs: tuple[float | None, float | None],
) -> None:
    assert ratio_of_two(costs, together=True) is None


def ratio_of_two(costs: tuple[float | None, float | None], together: bool) -> tuple[float, float] | None:
    """The interval of a variant's speed over that of a baseline half as fast; the costs are the baseline's and its."""
    speedup = known(two(costs=costs, together=together).rows[1].speedup)
    assert speedup.ratio == pytest.approx(2.0)
    return speedup.ci


def test_a_ratio_that_is_not_valid_names_every_reason_of_both_sides() -> None:
    reasons = ((VerdictReason.DRIFT,), (*DISTURBANCES, VerdictReason.OUTPUT_INVALID))
    speedup = known(two(reasons=reasons, together=False).rows[1].speedup)
    assert set(speedup.reasons) == {*DISTURBANCES, VerdictReason.OUTPUT_INVALID}


def test_what_is_not_valid_keeps_its_reason_and_is_not_best() -> None:
    attribution = two(reasons=((), (VerdictReason.OUTPUT_INVALID,)))
    assert attribution.rows[1].reason == "not valid: A token is missing."
    assert attribution.best == 0


@pytest.mark.parametrize(("speeds", "best"), [((10.0, 20.0), 1), ((20.0, 10.0), 0)])
def test_where_no_figure_is_valid_the_best_is_that_of_the_valid_ratios(
    speeds: tuple[float, float], best: int
) -> None:
    disturbed = (VerdictReason.FOREIGN_PROCESS,)
    assert two(speeds, (disturbed, disturbed)).best == best
    wrong = (*disturbed, VerdictReason.OUTPUT_INVALID)
    assert two(speeds, (wrong, wrong)).best is None


def test_a_rung_whose_output_is_wrong_is_passed_over_and_a_disturbed_one_is_not() -> None:
    spec = job("bf16", "int8_weight_only")
    variants = variants_of(spec)
    together = tuple(variant.index for variant in variants)

    def reference(reason: VerdictReason) -> str:
        outcomes = {
            variant.index: measured(
                variant, 10.0, *((reason,) if variant.label == "bf16" else ()), beside=together
            )
            for variant in variants
        }
        last = next(row for row in attribute(spec, variants, outcomes).rows if " + " in row.label)
        assert known(last.added).valid
        return variants[known(last.added).compared_with].label

    assert reference(VerdictReason.FOREIGN_PROCESS) == "bf16"
    assert reference(VerdictReason.OUTPUT_INVALID) == "baseline"


def test_the_baseline_measured_again_has_the_verdict_of_the_first() -> None:
    throttled = two(reasons=((VerdictReason.THROTTLED,), ()), together=False, again=((9.0, 9.0, 9.0),))
    again = known(throttled.baseline_again)
    assert again.ratio == pytest.approx(9.0 / (10.0 * statistics.median(PROCESS)))
    assert again.reasons == (VerdictReason.THROTTLED,)


def test_lower_is_better_turns_the_ratio_round(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job("bf16")
    monkeypatch.setattr(type(spec.workload), "primary", "latency_s")
    slow, fast = variants_of(spec)
    outcomes = {0: measured(slow, 4.0, metric="latency_s"), 1: measured(fast, 1.0, metric="latency_s")}
    attribution = attribute(spec, (slow, fast), outcomes)
    assert gains(attribution.rows[1]) == (4, 4, 4)
    assert attribution.best == 1


def test_implementations_of_one_length_are_compared_and_lengths_are_not() -> None:
    spec = JobSpec.model_validate(
        {"workload": {"kind": "attention", "lengths": [128, 256], "implementations": ["fused", "standard"]}}
    )
    variants = variants_of(spec)
    speeds = {"standard 128": 1.0, "fused 128": 2.0, "standard 256": 1.0, "fused 256": 3.0}
    outcomes = {v.index: measured(v, speeds[v.label], metric="tflops") for v in variants}
    rows = {row.label: row for row in attribute(spec, variants, outcomes).rows}
    assert {label: row.speedup and round(row.speedup.ratio, 6) for label, row in rows.items()} == {
        "fused 128": 2.0, "standard 128": None, "fused 256": 3.0, "standard 256": None,
    }  # fmt: skip
    assert known(rows["fused 256"].speedup).compared_with == rows["standard 256"].index
    by_length = {v.label: (v.workload_digest, v.digest) for v in variants}
    assert by_length["fused 128"][0] == by_length["standard 128"][0] != by_length["fused 256"][0]
    assert len({digest for _, digest in by_length.values()}) == 4
