"""The comparison with peers: which peers count, and which goals its figures reach. Figures are made up."""

from typing import Any

import pytest

from benchmarks.stacks import Q4_0, Case, spec_of
from benchmarks.vs_cases import (
    F16,
    FP32,
    IN_GOALS,
    OURS,
    Q4_0_HEAD,
    TIMED,
)
from benchmarks.vs_goals import counting, quality_goal, speed_goals
from benchmarks.vs_jobs import lines_of
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Measurement, Outcome, Verdict
from optigpu.job.attribution import attribute
from optigpu.measure import Report
from optigpu.statistics.intervals import summarise
from optigpu.vocabulary import Role, VariantStatus
from tests.unit.made_results import result


def line(name: str, rates: tuple[float, ...], ours: tuple[float, ...] = (), **more: Any) -> dict[str, Any]:
    """A row of a job; `ours` are the rates of the goals' stack in it."""
    ratio = rates[0] / 100 if rates else None
    measured = {
        "ratio": ratio,
        "ratio_interval": ratio and (ratio, ratio),
        "rate": rates[0] if rates else None,
    }
    about: dict[str, Any] = {
        "weight_bytes": 83_000_000,
        "reason": None if rates else "no compiler",
        "verdict": (),
        "warnings": (),
        "details": {},
        "ours": ours,
        "ours_verdict": (),
        "group": 0,
    }
    return {"name": name, "rates": rates} | measured | about | more


def scored(**divergences: float) -> list[dict[str, Any]]:
    """Lines of a case of quality: ours at 0.01, and others by name."""
    return [{"name": IN_GOALS.name, "kld_mean": 0.01}] + [
        {"name": name, "kld_mean": value} for name, value in divergences.items()
    ]


def test_a_goal_is_a_ratio_of_pairs_of_processes_with_all_in_4_bits_beside_it() -> None:
    ours = (280.0, 140.0, 280.0)
    lines = [
        line(Q4_0.name, (100.0, 50.0, 100.0), ours),
        line(Q4_0_HEAD.name, (112.0, 56.0, 112.0), ours),
    ]
    over_q4_0, over_best = speed_goals("decode-gpt2", lines, scored(**{Q4_0.name: 0.02}))
    assert over_q4_0["reached"]
    assert over_q4_0["goal"] == (
        f"decode-gpt2: {IN_GOALS.name} at least 2.7x llama.cpp Q4_0: 2.80x [2.80, 2.80]; "
        "llama.cpp Q4_0, head too: 2.50x [2.50, 2.50]"
    )
    assert not over_best["reached"], "no peer counts"
    assert over_best["goal"].endswith("the best of the peers that count: not measured")
    short = [line(Q4_0.name, (100.0,), (269.0,)), line(Q4_0_HEAD.name, ())]
    below, _ = speed_goals("decode-gpt2", short, [])
    assert not below["reached"]
    assert below["goal"].endswith("2.69x; llama.cpp Q4_0, head too: not measured")


def test_peers_count_up_to_a_tenth_above_our_divergence() -> None:
    lines = scored(**{"as good": 0.011, "worse": 0.0111, OURS[0].name: 0.005, FP32.name: 0.0})
    assert counting([*lines, {"name": "missing", "reason": "not installed"}]) == frozenset(
        {"as good", FP32.name}
    )
    assert counting([each for each in lines if each["name"] != IN_GOALS.name]) is None


def test_the_best_peer_is_that_beside_which_ours_is_least_faster() -> None:
    divergences = scored(**{"slow": 0.0, "fast": 0.011, "rough": 0.02, F16.name: 0.0})
    lines = [
        line(Q4_0.name, ()),
        line("slow", (100.0,), (300.0,)),
        line("fast", (150.0,), (270.0,)),
        line("rough", (200.0,), (280.0,)),
        line(F16.name, (), left_out=True),
    ]
    _, best = speed_goals("decode-gpt2", lines, divergences)
    assert best["reached"]
    assert best["goal"] == (
        f"decode-gpt2: {IN_GOALS.name} at least 1.6x the best of the peers that count: 1.80x fast, of 2; "
        "1.40x rough, which does not count; left out: llama.cpp F16"
    )
    _, best = speed_goals(
        "decode-gpt2", [*lines, line("faster", (200.0,), (300.0,))], divergences + scored(faster=0.0)[1:]
    )
    assert not best["reached"]
    assert "1.50x faster, of 3" in best["goal"]


def test_what_takes_turns_is_compared_turn_by_turn() -> None:
    turns = line("int8", (100.0, 110.0, 50.0), (150.0, 154.0, 100.0), ratios=(1.0, 1.0, 1.0), group=None)
    _, best = speed_goals("prefill-gpt2", [line(Q4_0.name, ()), turns], scored(int8=0.0))
    assert best["reached"]
    assert best["goal"].endswith("1.50x (1.40..2.00 of 3 turns) int8, of 1")


def test_a_peer_that_counts_and_failed_leaves_the_goal_unmeasured() -> None:
    lines = [line(Q4_0.name, ()), line("good", (1.0,), (9.0,)), line("gone", ())]
    first, best = speed_goals("decode-gpt2", lines, scored(good=0.0, gone=0.0))
    assert not best["reached"]
    assert best["goal"].endswith("not measured (gone: no compiler)")
    assert not first["reached"]
    assert first["goal"].endswith("at least 2.7x llama.cpp Q4_0: not measured (no compiler)")
    alone = [line(Q4_0.name, (1.0,)), line("good", (1.0,))]
    for goal in speed_goals("decode-gpt2", alone, scored(good=0.0)):
        assert not goal["reached"]
        assert "ours was not measured beside it" in goal["goal"]
    _, best = speed_goals("decode-gpt2", lines, [])
    assert best["goal"].endswith("not measured (the run has no divergence of ours)")


def test_a_peer_whose_output_is_wrong_stays_and_can_only_deny() -> None:
    wrong = [line("wrong", (100.0,), (150.0,), verdict=("output_invalid",)), line("good", (50.0,), (150.0,))]
    lines = [line(Q4_0.name, ()), *wrong]
    _, best = speed_goals("decode-gpt2", lines, scored(wrong=0.0, good=0.0))
    assert not best["reached"]
    assert best["goal"].endswith("1.50x wrong (not valid: output_invalid), of 2")
    _, best = speed_goals("prefill-gpt2", lines, scored(wrong=0.0, good=0.0))
    assert best["reached"], "1.5x is enough beside both"


@pytest.mark.parametrize("whose", ["verdict", "ours_verdict"])
def test_a_result_that_is_not_valid_reaches_no_goal(whose: str) -> None:
    spoilt: dict[str, Any] = {whose: ("foreign_process",)}
    lines = [line(Q4_0.name, (100.0,), (900.0,), **spoilt), line(Q4_0_HEAD.name, ())]
    lines.append(line("peer", (100.0,), (900.0,), **spoilt))
    name = {"verdict": ("llama.cpp Q4_0", "peer"), "ours_verdict": (IN_GOALS.name, IN_GOALS.name)}[whose]
    for goal, of in zip(speed_goals("prefill-gpt2", lines, scored(peer=0.0)), name, strict=True):
        assert not goal["reached"]
        assert "9.00x" in goal["goal"]
        assert goal["goal"].endswith(f"; not valid ({of}: foreign_process)")


@pytest.mark.parametrize("ours", [0.004, 0.01, 0.02])
def test_quality_is_at_most_that_of_q4_0(ours: float) -> None:
    lines = [{"name": Q4_0.name, "kld_mean": 0.01}, {"name": IN_GOALS.name, "kld_mean": ours}]
    goal = quality_goal("quality-tiny", lines)
    assert goal["reached"] == (ours <= 0.01)
    assert goal["goal"].endswith(f"{ours:.5f} against 0.01000")
    assert not quality_goal("quality-tiny", lines[:1])["reached"]


def outcome(index: int, speeds: tuple[float, ...], factors: tuple[float, ...] = (), **facts: Any) -> Outcome:
    """What a job leaves of a variant: seven equal requests in each process, of so many tokens/s; by its turns so many
    times those of the first."""
    samples = {
        "tokens_per_s": tuple((speed,) * 7 for speed in speeds),
        "ttft_s": tuple((32 / speed,) * 7 for speed in speeds),
        "weight_bytes": tuple((4e6,) for _ in speeds),
    }
    metrics = {name: summarise(Measurement(name=name, samples=each)) for name, each in samples.items()}
    inverse = tuple(1 / factor for factor in factors)
    for name, of_turns in (("tokens_per_s", factors), ("ttft_s", inverse)):
        metrics[name] = metrics[name].model_copy(update={"beside": {0: of_turns} if of_turns else {}})
    made = result(index, Role.SINGLE, f"v{index}", metrics, Verdict(valid=True))
    made = made.model_copy(update={"facts": RunFacts.gathered({"side_by_side": (0, 1)} | facts)})
    return Outcome(index=index, status=VariantStatus.SUCCEEDED, result=made, samples=samples)


BUILT = {
    "threads": 2,
    "versions": {"llama-cpp-python": "0.3"},
    "llama_cpp_flags": "AVX2 = 1",
    "gguf_tensor_types": {"Q4_0": 48},
}


@pytest.mark.parametrize(("measure", "rates"), [("decode", (210.0, 105.0)), ("prefill", (210.0, 105.0))])
def test_a_row_of_a_job_has_its_rates_and_the_ratio_to_the_first_stack(
    measure: Any, rates: tuple[float, ...]
) -> None:
    stacks = (Q4_0, TIMED, FP32)
    case = Case("gpt2", 32, 0 if measure == "prefill" else 64, measure)
    spec = spec_of(stacks, case)
    gone = Outcome(index=2, status=VariantStatus.FAILED, reason="out of memory")
    outcomes = (outcome(0, (100.0, 50.0), (), **BUILT), outcome(1, rates), gone)
    report = Report(spec=spec, results=(), outcomes=outcomes, attribution=attribute(spec, (), {}))
    first, ours, none = lines_of(report, stacks, case, group=3)
    assert [each.name for each in (first, ours, none)] == [stack.name for stack in stacks]
    assert ours.rates == pytest.approx(rates)
    assert ours.rate == pytest.approx(157.5)
    assert ours.ratio == pytest.approx(2.1)
    assert ours.ratio_interval == pytest.approx((2.1, 2.1)), "in pairs the processes differ by nothing"
    if measure == "prefill":
        assert ours.interval is not None
        assert ours.interval[1] > 50 * 157.5, "two such processes say next to nothing"
    else:
        assert ours.interval is not None
        assert ours.interval[0] < 157.5 < ours.interval[1]
    assert (ours.weight_bytes, ours.valid, ours.group, ours.details) == (4_000_000, True, 3, {})
    assert first.details["version"] == "llama-cpp-python 0.3"
    assert first.details["tensor_types"] == {"Q4_0": 48}
    assert first.ours == ours.ours == ours.rates, "beside each row stand ours of the same job"
    assert (none.reason, none.rates, none.ratio) == ("out of memory", (), None)
    assert (first.ours_over, ours.ours_over) == ((), ())


@pytest.mark.parametrize("measure", ["decode", "prefill"])
def test_a_row_has_the_ratio_of_its_turns(measure: Any) -> None:
    stacks = (Q4_0, TIMED)
    case = Case("gpt2", 32, 0 if measure == "prefill" else 64, measure)
    spec = spec_of(stacks, case)
    outcomes = (outcome(0, (100.0, 50.0)), outcome(1, (210.0, 105.0), (3.0, 3.0)))
    report = Report(spec=spec, results=(), outcomes=outcomes, attribution=attribute(spec, (), {}))
    first, ours = lines_of(report, stacks, case, group=0)
    assert ours.ratio == pytest.approx(3)
    assert ours.ratio_interval == pytest.approx((3, 3))
    assert first.ours_over == pytest.approx((3, 3))
    (over_q4_0, _) = speed_goals(
        "decode-gpt2",
        [line(Q4_0.name, first.rates, first.ours, ours_over=first.ours_over), line(Q4_0_HEAD.name, ())],
        [],
    )
    assert over_q4_0["reached"]
    assert "llama.cpp Q4_0: 3.00x [3.00, 3.00]" in over_q4_0["goal"]
