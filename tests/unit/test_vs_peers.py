"""The comparison with peers: which goals its figures reach, and what its page says. Figures are made up."""

from typing import Any

import pytest

from benchmarks.peers import Peer
from benchmarks.stacks import LLAMA_CPP, Q4_0, Case, Stack, spec_of
from benchmarks.vs_cases import ELSEWHERE, FP32, IN_GOALS, OURS, SPEED, quality_goal, speed_goals
from benchmarks.vs_jobs import lines_of
from benchmarks.vs_peers import goals
from benchmarks.vs_tables import markdown
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Measurement, Outcome, Verdict
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.measure import Report
from optigpu.statistics.intervals import summarise
from optigpu.vocabulary import Role, SpecError, VariantStatus
from tests.unit.made_results import result


def line(name: str, rates: tuple[float, ...], group: int | None = 0, **more: Any) -> dict[str, Any]:
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
    }
    return {"name": name, "rates": rates, "group": group} | measured | about | more


def test_goals_are_ratios_of_pairs_of_processes() -> None:
    lines = [
        line(Q4_0.name, (100.0, 50.0, 100.0)),
        line(FP32.name, (10.0, 5.0, 10.0)),
        line(IN_GOALS.name, (210.0, 105.0, 210.0)),
    ]
    over_q4_0, over_fp32 = speed_goals("decode-gpt2", lines)
    assert over_q4_0["reached"]
    assert "at least 2x llama.cpp Q4_0: 2.10x [2.10, 2.10] (aim 2.7x: not reached)" in over_q4_0["goal"]
    assert over_fp32["reached"]
    assert "21.00x [21.00, 21.00] (aim 25x: not reached)" in over_fp32["goal"]
    (prefill,) = speed_goals("prefill-gpt2", [lines[0], line(IN_GOALS.name, (99.0, 49.0, 99.0))])
    assert not prefill["reached"]


@pytest.mark.parametrize("name", SPEED)
def test_a_short_run_measures_what_the_goals_are_about_and_names_the_rest(name: str) -> None:
    whole, short = SPEED[name], SPEED[name].of_goals()
    measured = {Q4_0.name, *(stack.name for stack in short.stacks)}
    assert {IN_GOALS.name, *(goal.against.name for goal in whole.goals)} <= measured
    assert len(short.stacks) < len(whole.stacks)
    assert not short.elsewhere
    every = {stack.name for stack in whole.stacks} | {peer.name for peer in whole.elsewhere}
    assert every - measured <= set(short.left_out)


@pytest.mark.parametrize("ours", [line(IN_GOALS.name, ()), line(IN_GOALS.name, (900.0, 900.0), group=1)])
def test_what_was_not_measured_in_the_same_job_is_not_reached(ours: dict[str, Any]) -> None:
    (goal,) = speed_goals("decode-llama-3.2-1b", [line(Q4_0.name, (100.0, 100.0)), ours])
    assert not goal["reached"]
    assert goal["goal"].endswith("not measured")


def test_a_result_that_is_not_valid_reaches_no_goal() -> None:
    lines = [line(Q4_0.name, (100.0,), verdict=("drift",)), line(IN_GOALS.name, (900.0,))]
    (goal,) = speed_goals("prefill-gpt2", lines)
    assert not goal["reached"]
    assert goal["goal"].endswith("9.00x (aim 1.5x: reached); not valid (llama.cpp Q4_0: drift)")


@pytest.mark.parametrize("ours", [0.004, 0.008, 0.02])
def test_quality_is_at_most_the_peers_divergence(ours: float) -> None:
    lines = [{"name": name, "kld_mean": value} for name, value in (("worse", 0.01), ("better", 0.005))]
    both = [{"name": IN_GOALS.name, "kld_mean": ours}, {"name": OURS[0].name, "kld_mean": ours / 2}]
    goal = quality_goal("quality-tiny", [*lines, *both], "worse", "better")
    assert goal["reached"] == (ours <= 0.01)
    assert ("0.00500: reached" in goal["goal"]) == (ours <= 0.005)
    assert ("the default reached" in goal["goal"]) == (ours <= 0.01)
    assert not quality_goal("quality-tiny", lines, "worse", "better")["reached"]


def test_the_page_has_every_figure_reason_and_flag() -> None:
    details = {
        "version": "llama-cpp-python 1",
        "threads": 2,
        "flags": "AVX2 = 1",
        "tensor_types": {"Q4_0": 48},
    }
    speed = {
        "case": {"preset": "gpt2", "prompt_tokens": 32, "new_tokens": 64},
        "measure": {"replicates": 3},
        "published": {"gpu-poor, published": "27% of the bytes"},
        "lines": [
            line(Q4_0.name, (100.0, 100.0), details=details),
            line(IN_GOALS.name, ()),
            line(FP32.name, (5.0, 5.0), verdict=("drift",), warnings=("few_samples",)),
            line("torchao", (7.0, 8.0), ratios=[0.07, 0.08], group=None),
        ],
    }
    quality = {"model": "bundled:tiny", "sequences": 8, "length": 256, "positions": 1984, "beside": Q4_0.name}
    figures = {"kld_mean": 0.0096, "kld_standard_error": 0.0004, "kld_p99": 0.04, "top1_agreement": 0.93}
    beside = {"difference": 0.0, "standard_error": 0.0}
    scored = {"name": Q4_0.name, "weight_bytes": 2_800_000, "beside": beside, **figures}
    refused = {"name": "bitsandbytes NF4", "reason": "bitsandbytes not installed"}
    document: dict[str, Any] = {
        "speed": {"decode-gpt2": speed},
        "quality": {"quality-tiny": quality | {"lines": [scored, refused]}},
    }
    document |= {"load_before": 0.1, "cores": 2}
    page = markdown(document | {"goals": goals(document)})
    assert "Others used" not in page
    assert "Others used" in markdown(document | {"goals": [], "load_before": 2.0})
    for row in (
        "### decode-gpt2: `preset:gpt2`, batch 1, 32 tokens + 64, 3 processes",
        "| llama.cpp Q4_0 | 100.0 | 1.00 | 1.00..1.00 | 83.0 | 0.00960 |",
        f"| {FP32.name} | 5.0 | 0.05 | 0.05..0.05; NOT valid: drift; few_samples | 83.0 |  |",
        "| torchao | 7.0 | 0.07 | 0.07..0.08 of 2 turns | 83.0 |  |",
        f"| {IN_GOALS.name} |  | no compiler |  |  |  |",
        "| gpu-poor, published |  | 27% of the bytes |  |  |  |",
        "| bitsandbytes NF4 | bitsandbytes not installed |  |  |  |  |",
        "- llama.cpp Q4_0: llama-cpp-python 1, 2 threads, AVX2 = 1",
        "- llama.cpp Q4_0 of `preset:gpt2`: 48 Q4_0",
        f"- NOT reached: decode-gpt2: {IN_GOALS.name} at least 2x llama.cpp Q4_0: not measured",
    ):
        assert row in page.splitlines()


def test_a_missing_package_is_named() -> None:
    reason = Peer("a peer", "weights", ("json", "no_such_package")).missing()
    assert reason == 'no_such_package not installed: pip install -e ".[peers]"'


def test_an_unknown_technique_is_a_reason_and_no_crash() -> None:
    with pytest.raises(SpecError, match="no_such_technique"):
        spec_of([Stack("wrong", ({"name": "no_such_technique"},))], Case("gpt2", 32, 64))


def test_a_case_is_a_job_whose_variants_are_its_stacks() -> None:
    for speed in SPEED.values():
        stacks = (Q4_0, *speed.stacks)
        variants = variants_of(spec_of(stacks, speed.case))
        assert [variant.label for variant in variants[1:]] == [stack.name for stack in stacks[1:]]
        assert [variant.backend for variant in variants] == [stack.backend for stack in stacks]


def test_each_case_compares_the_goals_stack_with_their_peers_in_one_job() -> None:
    for speed in SPEED.values():
        together = (Q4_0, *speed.stacks)[: speed.at_once + 1]
        assert IN_GOALS.name in {stack.name for stack in together}
        assert all(goal.against in together for goal in speed.goals)
        named = {stack.name for stack in (Q4_0, *speed.stacks)} | set(speed.left_out)
        named |= {peer.name for peer in speed.elsewhere}
        assert {stack.name for stack in (FP32, *LLAMA_CPP)} | {peer.name for peer in ELSEWHERE} <= named


def outcome(index: int, speeds: tuple[float, ...], **facts: Any) -> Outcome:
    """What a job leaves of a variant: seven equal requests in each process, of so many tokens/s."""
    samples = {
        "tokens_per_s": tuple((speed,) * 7 for speed in speeds),
        "ttft_s": tuple((32 / speed,) * 7 for speed in speeds),
        "weight_bytes": tuple((4e6,) for _ in speeds),
    }
    metrics = {name: summarise(Measurement(name=name, samples=each)) for name, each in samples.items()}
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
    stacks = (Q4_0, IN_GOALS, FP32)
    case = Case("gpt2", 32, 0 if measure == "prefill" else 64, measure)
    spec = spec_of(stacks, case)
    gone = Outcome(index=2, status=VariantStatus.FAILED, reason="out of memory")
    outcomes = (outcome(0, (100.0, 50.0), **BUILT), outcome(1, rates), gone)
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
    assert (none.reason, none.rates, none.ratio) == ("out of memory", (), None)
