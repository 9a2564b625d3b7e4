"""The comparison with peers: which peers count, which goals its figures reach, and what its page says. Figures are made
up."""

from typing import Any

import pytest

from benchmarks.engine_cases import ONNX_INT4, ONNX_INT8, OPENVINO_INT4, OPENVINO_INT8
from benchmarks.peers import Peer
from benchmarks.stacks import LLAMA_CPP, Q4_0, Q4_K_M, Case, Stack, details_of, spec_of
from benchmarks.vs_cases import (
    ELSEWHERE,
    F16,
    FP32,
    IK_LLAMA_CPP,
    IN_GOALS,
    KIN,
    OURS,
    Q4_0_HEAD,
    QUALITY,
    SPEED,
    TIMED,
    WIDE,
    name_of,
)
from benchmarks.vs_goals import GOALS, counting, quality_goal, speed_goals
from benchmarks.vs_jobs import lines_of
from benchmarks.vs_peers import QUALITY_OF_ALL, QUALITY_OF_GOALS, goals, loaded
from benchmarks.vs_tables import markdown
from optigpu.conductor.processes.residents import MOST_RESIDENT
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Measurement, Outcome, Verdict, VerdictReason
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.measure import Report
from optigpu.statistics.intervals import summarise
from optigpu.vocabulary import Role, SpecError, VariantStatus
from tests.unit.made_results import result

MINUTE_S = 60
BESIDE_JOBS_S = 300
"""What quality and turns take beside the jobs of a run for the goals alone, by its docstring."""


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


def test_the_goals_are_those_of_the_task() -> None:
    best = {name: next(goal.least for goal in each if goal.against is None) for name, each in GOALS.items()}
    q4_0 = {name: next(goal.least for goal in each if goal.against == Q4_0) for name, each in GOALS.items()}
    assert q4_0 == {
        "decode-gpt2": 2.7,
        "decode-llama-3.2-1b": 2.0,
        "prefill-gpt2": 1.8,
        "prefill-llama-3.2-1b": 1.8,
    }
    assert best == {name: 1.6 if name.startswith("decode") else 1.3 for name in GOALS}
    assert {name_of(case) for speed in SPEED.values() for case in speed.cases} == set(GOALS)


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


@pytest.mark.parametrize("name", SPEED)
def test_a_short_run_measures_what_the_goals_are_about_and_names_the_rest(name: str) -> None:
    whole = SPEED[name]
    short = whole.of_goals({Q4_K_M.name, OPENVINO_INT8.name, *WIDE})
    assert {stack.name for stack in short.stacks} == {Q4_0_HEAD.name, Q4_K_M.name, OPENVINO_INT8.name}
    assert not short.elsewhere
    assert whole.names - {stack.name for stack in short.stacks} <= set(short.left_out)
    assert short.budget_s == whole.short_s < whole.budget_s


def test_a_run_has_its_time() -> None:
    """Beside the jobs there are the cases of quality and the turns."""
    assert sum(speed.short_s for speed in SPEED.values()) + BESIDE_JOBS_S <= 20 * MINUTE_S
    assert sum(speed.budget_s for speed in SPEED.values()) + 2 * BESIDE_JOBS_S <= 40 * MINUTE_S


def test_every_peer_is_in_every_case() -> None:
    engines = {
        each.name for each in (*IK_LLAMA_CPP, *LLAMA_CPP, ONNX_INT4, ONNX_INT8, OPENVINO_INT4, OPENVINO_INT8)
    }
    everybody = engines | {Q4_0_HEAD.name, FP32.name} | {peer.name for peer in ELSEWHERE}
    for speed in SPEED.values():
        named = {Q4_0.name, *speed.names, *speed.left_out}
        assert everybody <= named
        assert {"native_decode w4k", "native_decode w3k"} <= named
    assert everybody <= {subject.name for subject in QUALITY_OF_ALL}
    assert everybody - {FP32.name} <= {subject.name for subject in QUALITY_OF_GOALS}
    assert set(KIN.values()) == set(QUALITY)


def test_a_loaded_machine_is_said_so() -> None:
    quiet = {"load_before": 0.2, "cores": 2, "speed": {"decode-gpt2": {"lines": [line("a", (1.0,))]}}}
    assert not list(loaded(quiet))
    disturbed = line("a", (1.0,), verdict=(VerdictReason.FOREIGN_PROCESS,), notes=("Others used 0.9 cores.",))
    speed = {"decode-gpt2": {"lines": [disturbed]}, "prefill-gpt2": {"reason": "no model"}}
    before, during = loaded({"load_before": 2.0, "cores": 2, "speed": speed})
    assert before == "Others used this machine, with a load of 2.0 on 2 cores before the run."
    assert during == "decode-gpt2, a: Others used 0.9 cores."


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
            line(Q4_0_HEAD.name, ()),
            line(IN_GOALS.name, ()),
            line(FP32.name, (5.0, 5.0), verdict=("drift",), warnings=("few_samples",)),
            line("torchao", (7.0, 8.0), ratios=[0.07, 0.08], group=None),
        ],
    }
    quality = {"model": "bundled:tiny", "sequences": 8, "length": 256, "positions": 1984, "beside": Q4_0.name}
    figures = {"kld_mean": 0.0096, "kld_standard_error": 0.0004, "kld_p99": 0.04, "top1_agreement": 0.93}
    beside = {"difference": 0.0, "standard_error": 0.0}
    measured = {"name": Q4_0.name, "weight_bytes": 2_800_000, "beside": beside, **figures}
    refused = {"name": "bitsandbytes NF4", "reason": "bitsandbytes not installed"}
    document: dict[str, Any] = {
        "speed": {"decode-gpt2": speed},
        "quality": {"quality-tiny": quality | {"lines": [measured, refused]}},
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
        f"- NOT reached: decode-gpt2: {IN_GOALS.name} at least 2.7x llama.cpp Q4_0: not measured "
        "(ours was not measured beside it)",
    ):
        assert row in page.splitlines()


def test_a_missing_package_is_named() -> None:
    reason = Peer("a peer", "weights", ("json", "no_such_package")).missing()
    assert reason == 'no_such_package not installed: pip install -e ".[peers]"'


def test_an_unknown_technique_is_a_reason_and_no_crash() -> None:
    with pytest.raises(SpecError, match="no_such_technique"):
        spec_of([Stack("wrong", ({"name": "no_such_technique"},))], Case("gpt2", 32, 64))


def test_a_case_is_jobs_of_the_first_stack_and_ours_beside_the_others() -> None:
    for speed in SPEED.values():
        stacks = (Q4_0, TIMED, *speed.stacks)
        variants = variants_of(spec_of(stacks, speed.cases[0]))
        assert [variant.label for variant in variants[1:]] == [stack.name for stack in stacks[1:]]
        assert [variant.backend for variant in variants] == [stack.backend for stack in stacks]
        assert speed.at_once + 2 <= MOST_RESIDENT, "each is a pair with ours"
        assert len({(case.prompt_tokens, case.preset) for case in speed.cases}) == 1


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


def test_an_engine_says_how_it_was_built() -> None:
    facts = {"threads": 2, "versions": {"openvino": "1"}, "recorded": {}}
    facts["recorded"] = {"openvino_build": "1-release", "openvino_constants": {"i4": 48}}
    assert details_of(facts) == {
        "flags": "1-release",
        "threads": 2,
        "version": "openvino 1",
        "tensor_types": {"i4": 48},
    }
    assert details_of(facts | {"recorded": {"decode_bytes": 1}}) == {}


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
