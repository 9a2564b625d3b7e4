"""Verdicts on made-up replicates: each detector on both sides of its line. tests/engine provokes them from outside."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optigpu.child.messages import Audited, Ready
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts import disturbance
from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.conductor.verdicts.judge import judge
from optigpu.documents.result import MetricSummary, Verdict, VerdictReason, VerdictWarning
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.statistics.drift import Array
from optigpu.vocabulary import METRICS

QUIET = HostSample(wall_s=1.25, cpus=2, foreign_s=0.02, idle_s=1.0, steal_s=0.0, named={"sshd": 0.01})
ROUNDS = 4
REQUESTS = 30


def spec(device: str = "cpu", **limits: float) -> JobSpec:
    document = {"workload": {"kind": "generate"}, "model": "path:trained", "device": device}
    return JobSpec.model_validate(document | {"limits": limits})


def samples(latencies_s: Sequence[float] | Array, ttft_s: float = 0.2) -> dict[str, tuple[float, ...]]:
    """Those of a generate workload whose first token takes a share of each request."""
    times = np.asarray(latencies_s)
    columns = {
        "latency_s": times,
        "requests_per_s": 1 / times,
        "tokens_per_s": 100 / times,
        "tpot_s": times / 100,
        "ttft_s": ttft_s * times,
    }
    return {name: tuple(map(float, values)) for name, values in columns.items()}


def replicate(**changes: Any) -> Replicate:
    """A quiet one: requests of 20 ms, 3% wide, in equal rounds."""
    latencies = 0.02 * np.random.default_rng(0).lognormal(0, 0.03, ROUNDS * REQUESTS)
    made = Replicate(
        ready=Ready(load_s=1, compile_s=None, steady=True, warmup_requests=3, request_s=0.02),
        samples=samples(latencies),
        rounds=(REQUESTS,) * ROUNDS,
        host_samples=(QUIET,) * ROUNDS,
        width=0.001,
        audit=Audited(samples=samples([0.021, 0.02, 0.022])),
    )
    return replace(made, **changes)


def seen(**changes: Any) -> Replicate:
    """A replicate that went through four equal rounds with this to be seen."""
    return replicate(host_samples=(replace(QUIET, **changes),) * ROUNDS)


def verdict(
    *replicates: Replicate, job: JobSpec | None = None, metrics: Mapping[str, MetricSummary] | None = None
) -> Verdict:
    """Three replicates unless it is said otherwise, so that nothing but the detectors speaks."""
    job = job or spec()
    quiet = [replicate()] * (3 - len(replicates))
    return judge(job, variants_of(job)[0], [*quiet, *replicates], metrics or {})


def test_a_quiet_run_is_valid_without_a_mark() -> None:
    assert verdict() == Verdict(valid=True)


@pytest.mark.parametrize(
    ("found", "reason", "words"),
    [
        (
            {"foreign_s": 0.25, "named": {"hog": 0.2, "ls": 0.001}},
            "foreign_process",
            "Other processes used 0.20 of 2 cores (hog 0.16) during",
        ),
        (
            {"foreign_s": 1.25, "named": {}},
            "foreign_process",
            "used 1.00 of 2 cores during replicate 3; stop them",
        ),
        (
            {"crowding": frozenset({(7, 1, "miner")})},
            "foreign_process",
            "processes (miner) ran or waited for a CPU",
        ),
        ({"heat_slowdowns": 2}, "throttled", "The CPU slowed down 8 times because of heat"),
        ({"quota_wait_s": 0.02}, "throttled", "wait for 0.08 s of 5.0 s"),
        ({"gpu_heat_s": 0.1}, "throttled", "Heat lowered the GPU's clock for 0.40 s of 5.0 s"),
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
        ({"steal_s": 0.05}, "shared_host", "2.0% of the CPUs' time"),
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
        {"foreign_s": 0.18, "named": {"cron": 0.15}},
        {"foreign_s": -0.03},
        {"foreign_s": None, "idle_s": None, "steal_s": None},
        {"cpus": 64, "foreign_s": 0.6},
        {"quota_wait_s": 0.01},
        {"gpu_heat_s": 0.01, "gpu_power_cap_s": 0.01},
        {"gpu_slowdowns": frozenset({"gpu_idle", "applications_clocks_setting"})},
        {"suspended_s": 2e-6, "wall_jump_s": 0.05},
        {"steal_s": 0.02},
        {"clock_hz": 2.4e9},
    ],
)
def test_what_a_quiet_machine_shows_is_no_finding(found: dict[str, Any]) -> None:
    assert verdict(seen(**found)) == Verdict(valid=True)


def test_others_are_judged_over_all_rounds_and_only_where_these_last() -> None:
    busy = replace(QUIET, foreign_s=1.0)
    once = replicate(host_samples=(*(QUIET,) * 9, busy))
    assert verdict(once).valid, "0.09 cores over ten rounds"
    burst = replace(busy, wall_s=0.2, foreign_s=0.06)
    assert verdict(replicate(host_samples=(burst,) * 4)).valid, "a daemon's burst within less than a second"
    short = replace(busy, wall_s=0.1, foreign_s=0.1)
    assert verdict(replicate(host_samples=(short,) * ROUNDS)).valid, "0.4 s are too few ticks"
    assert verdict(replicate(host_samples=(short,) * 6)).reasons == (VerdictReason.FOREIGN_PROCESS,)


def test_one_process_that_never_rests_is_found_among_many_cpus() -> None:
    assert verdict(seen(cpus=256, foreign_s=1.25)).reasons == (VerdictReason.FOREIGN_PROCESS,)


def test_a_process_that_rested_once_does_not_crowd() -> None:
    crowded = replace(QUIET, crowding=frozenset({(7, 1, "cc1plus")}))
    assert verdict(replicate(host_samples=(*(crowded,) * 3, QUIET))).valid
    assert verdict(replicate(host_samples=(crowded,) * (disturbance.CROWDED_ROUNDS - 1))).valid, (
        "too few to tell"
    )


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
    judged = verdict(replicate(host_samples=tuple(host_samples)))
    assert judged.warnings == (VerdictWarning.CLOCK_UNSTABLE,)
    assert "between 2700 and 3100 MHz" in judged.notes[0]
    assert verdict(replicate(host_samples=tuple(host_samples[:2]))) == Verdict(valid=True)


def test_every_replicate_is_named_in_one_note() -> None:
    judged = verdict(seen(heat_slowdowns=1), replicate(), seen(heat_slowdowns=2))
    assert judged.notes == (
        "The CPU slowed down 4 times because of heat during replicate 1 (and during replicate 3); "
        "cool it or lower its power limit, and measure again.",
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


def stopped_for(seconds: float, request_s: float) -> Replicate:
    latencies = [request_s] * 119 + [request_s + seconds]
    ready = Ready(load_s=1, compile_s=None, steady=True, warmup_requests=3, request_s=request_s)
    audit = Audited(samples=samples([request_s]))
    return replicate(samples=samples(latencies), ready=ready, audit=audit)


def test_a_request_that_stood_still_is_an_interruption() -> None:
    judged = verdict(stopped_for(3.0, request_s=0.02))
    assert judged.reasons == (VerdictReason.INTERRUPTED,)
    assert "about 3.0 s" in judged.notes[0]


@pytest.mark.parametrize(("seconds", "request_s"), [(0.9, 0.001), (3.0, 0.2)])
def test_a_slow_request_is_none(seconds: float, request_s: float) -> None:
    assert verdict(stopped_for(seconds, request_s)).valid


def test_a_pause_before_the_first_token_is_one_too() -> None:
    """The primary metric, tokens per second after the first, knows nothing of it."""
    stopped = stopped_for(3.0, request_s=0.02)
    steady = replicate().samples["tokens_per_s"]
    judged = verdict(replace(stopped, samples=stopped.samples | {"tokens_per_s": steady}))
    assert judged.reasons == (VerdictReason.INTERRUPTED,)


def test_a_sample_that_is_a_share_of_its_request_is_scaled_to_it() -> None:
    """A matmul's latency is one product's, of hundreds in a request."""
    stopped = stopped_for(0.01, request_s=1e-4)
    longer = stopped.ready.model_copy(update={"request_s": 0.05})
    assert verdict(stopped).valid
    assert verdict(replace(stopped, ready=longer)).reasons == (VerdictReason.INTERRUPTED,)


def test_fresh_inputs_that_take_longer_give_a_cache_away() -> None:
    judged = verdict(replicate(audit=Audited(samples=samples([0.5, 0.4, 0.6]))))
    assert judged.reasons == (VerdictReason.CACHED_RESULT,)
    assert "latency_s" in judged.notes[0]


def test_a_prefill_that_was_kept_shows_in_the_first_token() -> None:
    audit = Audited(samples=samples([0.022] * 3, ttft_s=0.5))
    judged = verdict(replicate(audit=audit))
    assert judged.reasons == (VerdictReason.CACHED_RESULT,)
    assert "ttft_s" in judged.notes[0]


def test_one_fresh_request_as_fast_as_the_others_shows_that_nothing_is_kept() -> None:
    assert verdict(replicate(audit=Audited(samples=samples([0.5, 0.02, 0.6])))).valid
    slow_moment = Audited(samples=samples([0.5, 0.4, 0.6]), repeated=samples([0.45, 0.5]))
    assert verdict(replicate(audit=slow_moment)).valid, "what is repeated was just as slow then"


def test_requests_after_a_rest_are_compared_with_their_like() -> None:
    slow_starts = ([0.05] * 3 + [0.02] * (REQUESTS - 3)) * ROUNDS
    audit = Audited(samples=samples([0.05] * 3))
    assert verdict(replicate(samples=samples(slow_starts), audit=audit)).valid


def test_a_machine_that_slowed_down_by_the_audit_is_no_cache() -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.03, ROUNDS * REQUESTS)
    slower = np.repeat([0.02, 0.02, 0.04, 0.04], REQUESTS) * noise
    judged = verdict(replicate(samples=samples(slower), audit=Audited(samples=samples([0.045] * 3))))
    assert VerdictReason.CACHED_RESULT not in judged.reasons


def test_without_an_audit_nothing_is_said_of_caches() -> None:
    assert verdict(replicate(audit=None)).valid


def test_a_wrong_output_is_told_once_whenever_it_is_found() -> None:
    ready = replicate().ready.model_copy(update={"problem": "3 of 8 tokens"})
    later = Audited(samples={}, problem="2 logits are NaN.")
    judged = verdict(replicate(ready=ready), replicate(ready=ready), replicate(audit=later))
    assert judged.reasons == (VerdictReason.OUTPUT_INVALID,)
    assert judged.notes == ("3 of 8 tokens 2 logits are NaN.",)


def quality(name: str, value: float | None, reason: str | None = None) -> MetricSummary:
    return MetricSummary(unit=METRICS[name].unit, better=METRICS[name].better, value=value, reason=reason)


@pytest.mark.parametrize(
    ("kld", "top1", "passes"), [(0.05, 0.9, True), (0.051, 0.9, False), (0.01, 0.89, False)]
)
def test_a_variant_that_loses_too_much_quality_is_not_ranked(kld: float, top1: float, passes: bool) -> None:
    gated = spec(max_kld=0.05, min_top1=0.9)
    metrics = {"kld_mean": quality("kld_mean", kld), "top1_agreement": quality("top1_agreement", top1)}
    judged = verdict(job=gated, metrics=metrics)
    assert judged.valid is passes
    assert judged.reasons == (() if passes else (VerdictReason.QUALITY_BELOW_GATE,))
    assert verdict(metrics=metrics).valid, "no gate, no judgement"


def test_a_gate_that_could_not_be_checked_is_not_passed() -> None:
    metrics = {"kld_mean": quality("kld_mean", None, "The text is too short.")}
    unread = verdict(job=spec(max_kld=0.05), metrics=metrics)
    assert unread.reasons == (VerdictReason.QUALITY_BELOW_GATE,)
    assert "The text is too short." in unread.notes[0]
    assert verdict(job=spec(min_top1=0.5)).reasons == (VerdictReason.QUALITY_BELOW_GATE,)


def test_several_findings_each_have_their_note() -> None:
    judged = verdict(seen(heat_slowdowns=1, foreign_s=2.0, steal_s=0.5))
    assert judged.reasons == (VerdictReason.THROTTLED, VerdictReason.FOREIGN_PROCESS)
    assert judged.warnings == (VerdictWarning.SHARED_HOST,)
    assert len(judged.notes) == 3


def test_few_and_unsettled_samples_are_marked_as_before() -> None:
    job = spec()
    few = replicate(samples=samples([0.02] * 4), rounds=(4,), width=0.5, audit=None)
    judged = judge(job, variants_of(job)[0], [few], {})
    assert judged.valid
    assert judged.warnings == (
        VerdictWarning.SINGLE_REPLICATE,
        VerdictWarning.NOT_CONVERGED,
        VerdictWarning.FEW_SAMPLES,
    )
    assert len(judged.notes) == 3
