"""Verdicts on made-up replicates: each detector on both sides of its line. tests/engine provokes them from outside."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optigpu.child.messages import Audited, Ready
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts import disturbance
from optigpu.conductor.verdicts.judge import judge
from optigpu.documents.facts import BuildFacts, WeightFacts
from optigpu.documents.result import MetricSummary, Verdict, VerdictReason, VerdictWarning
from optigpu.job.plan import variants_of
from tests.unit.made_replicates import (
    QUIET,
    REQUESTS,
    ROUNDS,
    evidence,
    replicate,
    samples,
    seen,
    spec,
    verdict,
)
from tests.unit.made_results import metric


def test_a_quiet_run_is_valid_without_a_mark() -> None:
    assert verdict() == Verdict(valid=True)


@pytest.mark.parametrize(
    ("found", "reason", "words"),
    [
        (
            {"foreign_s": 1.25, "named": {"hog": 1.2, "ls": 0.001}},
            "foreign_process",
            "Other processes used 1.00 of 2 cores (hog 0.96) during",
        ),
        (
            {"foreign_s": 1.25, "named": {}},
            "foreign_process",
            "used 1.00 of 2 cores during replicate 3; stop them",
        ),
        ({"heat_slowdowns": 2}, "throttled", "The CPU slowed down 8 times because of heat"),
        ({"quota_wait_s": 0.9}, "throttled", "wait for 3.60 s of 5.0 s"),
        ({"gpu_heat_s": 0.9}, "throttled", "Heat lowered the GPU's clock for 3.60 s of 5.0 s"),
        ({"gpu_slowdowns": frozenset({"hw_power_brake_slowdown"})}, "throttled", "hw_power_brake_slowdown"),
        ({"suspended_s": 30.0}, "interrupted", "The machine was suspended for 120.0 s"),
    ],
)
def test_what_disturbs_makes_a_result_invalid(found: dict[str, Any], reason: str, words: str) -> None:
    judged = verdict(seen(**found))
    assert judged.reasons == (VerdictReason(reason),)
    (note,) = judged.notes
    assert " during replicate 3; " in note
    assert words in note


@pytest.mark.parametrize(
    ("found", "warning", "words"),
    [
        ({"steal_s": 0.03}, "shared_host", "1.2% of the CPUs' time"),
        ({"others": True}, "shared_host", "Another job was measured"),
        ({"wall_jump_s": -3600.0}, "clock_unstable", "changed by -3600.0 s"),
        ({"gpu_power_cap_s": 0.5}, "clock_unstable", "2.00 s of 5.0 s"),
        ({"gpu_slowdowns": frozenset({"sw_power_cap"})}, "clock_unstable", "power limit"),
    ],
)
def test_what_a_reader_should_know_only_marks_it(found: dict[str, Any], warning: str, words: str) -> None:
    judged = verdict(seen(**found))
    assert judged.valid
    assert judged.warnings == (VerdictWarning(warning),)
    assert words in judged.notes[0]


@pytest.mark.parametrize(
    "found",
    [
        {"foreign_s": 0.05, "named": {"cron": 0.05}},
        {"foreign_s": -0.03},
        {"foreign_s": None, "idle_s": None, "steal_s": None},
        {"cpus": 64, "foreign_s": 0.6},
        {"quota_wait_s": 0.01, "foreign_s": 0.0},
        {"probe_s": 0.003},
        {"crowding": frozenset({(7, 1, "tee")})},
        {"gpu_heat_s": 0.01, "gpu_power_cap_s": 0.01},
        {"gpu_slowdowns": frozenset({"gpu_idle", "applications_clocks_setting"})},
        {"suspended_s": 2e-6, "wall_jump_s": 0.05},
        {"steal_s": 0.02},
        {"clock_hz": 2.4e9},
    ],
)
def test_what_a_quiet_machine_shows_is_no_finding(found: dict[str, Any]) -> None:
    assert verdict(seen(**found)) == Verdict(valid=True)


def test_a_process_that_never_rests_is_found_however_little_it_gets() -> None:
    crowded = replace(QUIET, crowding=frozenset({(7, 1, "miner")}), named={"miner": 0.01})
    judged = verdict(replicate(host_samples=(crowded,) * ROUNDS))
    assert judged.warnings == (VerdictWarning.DISTURBED,)
    assert (
        "Other processes (miner) ran or waited for a CPU all the time during replicate 3; stop"
        in judged.notes[0]
    )
    once = replicate(host_samples=(*(crowded,) * 3, QUIET))
    assert verdict(once) == Verdict(valid=True), "it rested once"
    few = disturbance.CROWDED_ROUNDS - 1
    short = replicate(host_samples=(crowded,) * few, rounds=(REQUESTS * ROUNDS // few,) * few)
    assert verdict(short) == Verdict(valid=True), "too few rounds to tell"


def test_a_job_on_a_gpu_is_disturbed_only_where_no_cpu_is_left_or_the_gpu_is_shared() -> None:
    on_gpu = spec("cuda")
    assert verdict(seen(cpus=16, foreign_s=10.0, idle_s=6.0), job=on_gpu).valid
    full = verdict(seen(cpus=16, foreign_s=18.0, idle_s=0.2), job=on_gpu)
    assert full.reasons == (VerdictReason.FOREIGN_PROCESS,)
    shared = verdict(seen(cpus=16, idle_s=19.0, gpu_foreign=2), job=on_gpu)
    assert shared.reasons == (VerdictReason.FOREIGN_PROCESS,)
    assert "2 other processes used the GPU" in shared.notes[0]


def test_a_clock_that_differs_between_rounds_is_a_mark() -> None:
    host_samples = [replace(QUIET, clock_hz=hz) for hz in (3.0e9, 3.1e9, 2.7e9)]
    judged = verdict(replicate(host_samples=tuple(host_samples), rounds=(40,) * 3))
    assert judged.warnings == (VerdictWarning.CLOCK_UNSTABLE,)
    assert "between 2700 and 3100 MHz" in judged.notes[0]
    assert verdict(replicate(host_samples=tuple(host_samples[:2]), rounds=(60,) * 2)) == Verdict(valid=True)


def test_tensors_that_the_model_does_not_use_are_a_mark() -> None:
    mark = of_weights(WeightFacts(unused="mtp.0.weight, mtp.1.weight and 7 more"))
    assert mark.warnings == (VerdictWarning.UNUSED_TENSORS,)
    assert mark.notes == (
        "The checkpoint has tensors that the model does not compute with: mtp.0.weight, mtp.1.weight and 7 more.",
    )
    assert of_weights(WeightFacts()) == Verdict(valid=True)


def of_weights(weights: WeightFacts) -> Verdict:
    one = replicate()
    facts = one.ready.facts.model_copy(update={"weights": weights})
    return verdict(replace(one, ready=one.ready.model_copy(update={"facts": facts})))


def test_a_library_that_lacks_what_the_machine_has_is_a_mark_with_the_command() -> None:
    whole = BuildFacts(package="torch", library="libtorch_cpu.so")
    lacking = ("avx512 instructions", "vnni instructions")
    plain = BuildFacts(
        package="llama-cpp-python", library="libggml-cpu.so", lacks=lacking, build="make llama"
    )
    job = spec()
    judged = judge(job, variants_of(job)[0], evidence([replicate()] * 3, job), {}, [whole, plain])
    assert judged.valid, "the figure is true of that build"
    assert judged.warnings == (VerdictWarning.HANDICAPPED_BUILD,)
    assert judged.notes == (
        "libggml-cpu.so of llama-cpp-python lacks avx512 instructions and vnni instructions, which this machine has, "
        "so its speed says little of what it can do; build it with: make llama.",
    )


def test_a_machine_that_slows_down_half_way_is_drift() -> None:
    latencies = np.repeat([0.02, 0.03], 60) * np.random.default_rng(0).lognormal(0, 0.03, 120)
    slowing = replicate(samples=samples(latencies))
    fast, slow = (
        replicate(samples=samples(part), rounds=(15,) * ROUNDS) for part in (latencies[:60], latencies[60:])
    )
    judged = verdict(fast, slowing, slow)
    assert judged.reasons == (VerdictReason.DRIFT,)
    assert "slower" in judged.notes[0]
    assert "took 1.5" in judged.notes[0]
    assert verdict(slowing, fast, slow).valid, "what comes back is in the interval"
    within_a_second = (replace(QUIET, wall_s=0.1, foreign_s=0.0),) * ROUNDS
    assert verdict(*(replace(each, host_samples=within_a_second) for each in (fast, slowing, slow))).valid


def stopped_for(seconds: float, request_s: float, requests: int = ROUNDS * REQUESTS) -> Replicate:
    """The last of its requests stood still."""
    latencies = [request_s] * (requests - 1) + [request_s + seconds]
    ready = Ready(load_s=1, compile_s=None, steady=True, warmup_requests=3, request_s=request_s)
    audit = Audited(samples=samples([request_s]))
    return replicate(
        samples=samples(latencies), ready=ready, audit=audit, rounds=(requests // ROUNDS,) * ROUNDS
    )


def test_a_request_that_stood_still_among_many_is_a_mark() -> None:
    judged = verdict(stopped_for(3.0, request_s=0.02))
    assert judged.valid
    assert judged.warnings == (VerdictWarning.DISTURBED,)
    assert "A request stood still for 3.0 s during replicate 3; do not stop" in judged.notes[0]
    assert judged.notes[0].endswith(
        "This can have cost less than 1% of the speed, and the intervals reach that far."
    )


def test_a_figure_that_is_made_of_such_requests_is_interrupted() -> None:
    stopped = stopped_for(3.0, request_s=0.02)
    half = samples([0.02, 3.02] * (ROUNDS * REQUESTS // 2))
    several = [replace(stopped, samples=half, request_s=half["latency_s"])] * 3
    assert verdict(*several).valid, "half of the requests are none that take far longer than the median"
    few = samples([0.02] * 65 + [3.02] * 55)
    rates = few | {"tokens_per_s": tuple(1 / (each * 100) for each in (*[0.02] * 55, *[3.02] * 65))}
    judged = verdict(*[replace(stopped, samples=rates)] * 3)
    assert judged.reasons == (VerdictReason.INTERRUPTED,)
    assert (
        "A request stood still for 3.0 s during replicate 1 (and during replicates 2 and 3)"
        in judged.notes[0]
    )


@pytest.mark.parametrize(("seconds", "request_s"), [(0.9, 0.001), (3.0, 0.2)])
def test_a_slow_request_is_none(seconds: float, request_s: float) -> None:
    assert verdict(stopped_for(seconds, request_s)) == Verdict(valid=True)


def test_a_pause_before_the_first_token_is_one_too() -> None:
    """The primary metric, tokens per second after the first, knows nothing of it."""
    stopped = stopped_for(3.0, request_s=0.02)
    steady = replicate().samples["tokens_per_s"]
    judged = verdict(replace(stopped, samples=stopped.samples | {"tokens_per_s": steady}))
    assert judged.warnings == (VerdictWarning.DISTURBED,)


def test_the_seconds_of_a_stop_are_the_clock_s_and_never_a_ratio_of_a_warm_request() -> None:
    """A matmul's latency is one product's, of hundreds in a request, and a warm request may itself have been slow."""
    stopped = stopped_for(0.01, request_s=1e-4)
    slow_to_warm_up = stopped.ready.model_copy(update={"request_s": 2.0})
    assert verdict(replace(stopped, ready=slow_to_warm_up)) == Verdict(valid=True)
    by_the_clock = (0.05,) * 119 + (5.05,)
    judged = verdict(replace(stopped, request_s=by_the_clock))
    assert "stood still for 5.0 s" in judged.notes[0]


@pytest.mark.parametrize(
    ("fresh", "metric_name"),
    [(samples([0.5, 0.4, 0.6]), "latency_s"), (samples([0.022] * 3, ttft_s=0.5), "ttft_s")],
)
def test_fresh_inputs_that_take_longer_give_a_cache_or_a_kept_prefill_away(
    fresh: dict[str, tuple[float, ...]], metric_name: str
) -> None:
    judged = verdict(replicate(audit=Audited(samples=fresh)))
    assert judged.reasons == (VerdictReason.CACHED_RESULT,)
    assert metric_name in judged.notes[0]


def test_one_fresh_request_as_fast_as_the_others_shows_that_nothing_is_kept() -> None:
    assert verdict(replicate(audit=Audited(samples=samples([0.5, 0.02, 0.6])))).valid
    slow_moment = Audited(samples=samples([0.5, 0.4, 0.6]), repeated=samples([0.45, 0.5]))
    assert verdict(replicate(audit=slow_moment)).valid, "what is repeated was just as slow then"


def test_a_machine_that_slowed_down_by_the_audit_is_no_cache() -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.03, ROUNDS * REQUESTS)
    slower = np.repeat([0.02, 0.02, 0.04, 0.04], REQUESTS) * noise
    judged = verdict(replicate(samples=samples(slower), audit=Audited(samples=samples([0.045] * 3))))
    assert VerdictReason.CACHED_RESULT not in judged.reasons


def test_a_wrong_output_is_told_once_whenever_it_is_found() -> None:
    ready = replicate().ready.model_copy(update={"problem": "3 of 8 tokens"})
    later = Audited(samples={}, problem="2 logits are NaN.")
    judged = verdict(replicate(ready=ready), replicate(ready=ready), replicate(audit=later))
    assert judged.reasons == (VerdictReason.OUTPUT_INVALID,)
    assert judged.notes == ("3 of 8 tokens. 2 logits are NaN.",)


@pytest.mark.parametrize(
    ("kld", "top1", "passes"), [(0.05, 0.9, True), (0.051, 0.9, False), (0.01, 0.89, False)]
)
def test_a_variant_that_loses_too_much_quality_is_not_ranked(kld: float, top1: float, passes: bool) -> None:
    gated = spec(max_kld=0.05, min_top1=0.9)
    metrics = {"kld_mean": metric("kld_mean", kld), "top1_agreement": metric("top1_agreement", top1)}
    judged = verdict(job=gated, metrics=metrics)
    assert judged.valid is passes
    assert judged.reasons == (() if passes else (VerdictReason.QUALITY_BELOW_GATE,))
    assert verdict(metrics=metrics).valid, "no gate, no judgement"


def test_a_gate_that_could_not_be_checked_is_not_passed() -> None:
    metrics = {"kld_mean": metric("kld_mean", None, reason="The text is too short.")}
    unread = verdict(job=spec(max_kld=0.05), metrics=metrics)
    assert unread.reasons == (VerdictReason.QUALITY_BELOW_GATE,)
    assert "The text is too short." in unread.notes[0]
    assert verdict(job=spec(min_top1=0.5)).reasons == (VerdictReason.QUALITY_BELOW_GATE,)


def test_several_findings_each_have_their_note_and_each_cause_one() -> None:
    judged = verdict(seen(heat_slowdowns=1, foreign_s=2.0, steal_s=0.5, others=True))
    assert judged.reasons == (VerdictReason.THROTTLED, VerdictReason.FOREIGN_PROCESS)
    assert judged.warnings == (VerdictWarning.SHARED_HOST,)
    assert len(judged.notes) == 3
    assert "used 1.60 of 2 cores" in judged.notes[1]
    assert "The hypervisor gave 20.0% of the CPUs' time" in judged.notes[1]
    assert "Another job" in judged.notes[2]
    assert judged.reason_notes == judged.notes[:2]


def agreed(low: float, high: float) -> dict[str, MetricSummary]:
    """A primary metric of 100 with this interval over its processes."""
    return {"tokens_per_s": metric("tokens_per_s", 100.0, (low, high))}


def test_a_figure_that_its_processes_agree_on_is_known_whatever_one_of_them_is_by_itself() -> None:
    metrics = agreed(99.9, 100.1)
    assert verdict(replicate(settled=False), metrics=metrics) == Verdict(valid=True)


@pytest.mark.parametrize("metrics", [agreed(98.0, 103.0), {}], ids=["they differ", "no interval"])
def test_a_figure_is_not_known_where_neither_a_process_nor_all_of_them_say_it_closely_enough(
    metrics: dict[str, MetricSummary],
) -> None:
    judged = verdict(replicate(settled=False), metrics=metrics)
    assert judged.warnings == (VerdictWarning.NOT_CONVERGED,)
    (note,) = judged.notes
    assert "In replicate 3 the median's interval was not known to be as narrow as 1% of the median" in note
    assert "warm-up" not in note, "the other cause is not named"


def test_a_warm_up_that_did_not_settle_is_named_although_their_processes_agree() -> None:
    cold = Ready(load_s=1, compile_s=None, steady=False, warmup_requests=3, request_s=0.02)
    judged = verdict(replicate(ready=cold), metrics=agreed(99.9, 100.1))
    assert judged.warnings == (VerdictWarning.NOT_CONVERGED,)
    assert judged.notes == (
        "In replicate 3 the last requests of the warm-up still differed by more than 5%.",
    )
