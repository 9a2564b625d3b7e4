"""Whether a variant's result is valid: reasons make it invalid, warnings only mark it, and each has a note."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts import disturbance
from optigpu.conductor.verdicts.disturbance import Disturbance
from optigpu.documents.result import MetricSummary, Verdict, VerdictReason, VerdictWarning
from optigpu.job.spec import JobSpec, Limits, Variant
from optigpu.statistics.drift import Array, drift
from optigpu.statistics.intervals import fewest_for
from optigpu.vocabulary import METRICS, Better

CACHED_RATIO = 1.5
"""A request with fresh inputs may take this many times as long as a repeated one."""
DRIFT_FROM_S = 15.0
"""Of rounds, all replicates together: a virtual machine's speed varies by half within seconds."""
STOPPED_RATIO, STOPPED_S = 20.0, 1.0
"""A request that takes this many times the median, and this many seconds more, was stopped from outside."""

Detector = Callable[[Replicate], Disturbance | None]


def judge(
    spec: JobSpec, variant: Variant, replicates: Sequence[Replicate], metrics: Mapping[str, MetricSummary]
) -> Verdict:
    """The verdict on a variant whose replicates were all measured and summarised as `metrics`."""
    reasons = _reasons(spec, variant, replicates, metrics)
    warnings = _doubts(spec, variant, replicates) | _disturbances(replicates)
    return Verdict(
        valid=not reasons,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        notes=(*reasons.values(), *warnings.values()),
    )


def _reasons(
    spec: JobSpec, variant: Variant, replicates: Sequence[Replicate], metrics: Mapping[str, MetricSummary]
) -> dict[VerdictReason, str]:
    primary = variant.workload.primary
    found = {
        VerdictReason.OUTPUT_INVALID: _wrong_outputs(replicates),
        VerdictReason.QUALITY_BELOW_GATE: _below_gate(spec.limits, metrics),
        VerdictReason.CACHED_RESULT: _first(partial(_cached, primary), replicates),
        VerdictReason.THROTTLED: _first(lambda each: disturbance.throttled(each.host_samples), replicates),
        VerdictReason.FOREIGN_PROCESS: _first(
            lambda each: disturbance.foreign(variant.device, each.host_samples), replicates
        ),
        VerdictReason.DRIFT: _drifted(primary, replicates),
        VerdictReason.INTERRUPTED: _first(partial(_interrupted, primary), replicates),
    }
    return {reason: note for reason, note in found.items() if note}


def _disturbances(replicates: Sequence[Replicate]) -> dict[VerdictWarning, str]:
    found = {
        VerdictWarning.CLOCK_UNSTABLE: _first(
            lambda each: disturbance.unstable(each.host_samples), replicates
        ),
        VerdictWarning.SHARED_HOST: _first(lambda each: disturbance.shared(each.host_samples), replicates),
    }
    return {warning: note for warning, note in found.items() if note}


def _first(detector: Detector, replicates: Sequence[Replicate]) -> str | None:
    """A detector's first finding, with the other replicates in which it found something."""
    found = {number: finding for number, each in enumerate(replicates, 1) if (finding := detector(each))}
    if not found:
        return None
    first, *others = found
    also = f" (and during {_numbered(others)})" if others else ""
    return found[first].sentence(f"during {_numbered([first])}{also}")


def _numbered(numbers: Sequence[int]) -> str:
    """For example "replicate 1", or "replicates 1, 2 and 4"."""
    *before, last = map(str, numbers)
    return f"replicates {', '.join(before)} and {last}" if before else f"replicate {last}"


def _wrong_outputs(replicates: Sequence[Replicate]) -> str | None:
    """Each different problem once: processes with the same error report the same problem."""
    ready = (replicate.ready.problem for replicate in replicates)
    audited = (replicate.audit.problem for replicate in replicates if replicate.audit)
    problems = dict.fromkeys(problem for problem in (*ready, *audited) if problem)
    return " ".join(problems) or None


def _below_gate(limits: Limits, metrics: Mapping[str, MetricSummary]) -> str | None:
    """A limit that could not be checked counts as exceeded."""
    gates = (("kld_mean", "max_kld", limits.max_kld), ("top1_agreement", "min_top1", limits.min_top1))
    return " ".join(filter(None, (_gate(*gate, metrics) for gate in gates))) or None


def _gate(name: str, limit: str, bound: float | None, metrics: Mapping[str, MetricSummary]) -> str | None:
    if bound is None:
        return None
    summary = metrics.get(name)
    if summary is None or summary.value is None:
        why = summary.reason if summary and summary.reason else "It was not measured."
        return f"limits.{limit} is set, but {name} is not known: {why}"
    lower = METRICS[name].better is Better.LOWER
    if summary.value <= bound if lower else summary.value >= bound:
        return None
    side = "above" if lower else "below"
    return f"{name} is {summary.value:.4g}, {side} limits.{limit} of {bound:g}."


def _cached(primary: str, replicate: Replicate) -> Disturbance | None:
    """Even the fastest request with fresh inputs took much longer than the repeated ones.

    It is compared with the slowest round, since the machine may have slowed down by then; with the first requests of a
    round, which follow a pause as the audit's do; and with repeated requests between the fresh ones, if there are any.
    """
    fresh = replicate.audit.samples if replicate.audit else {}
    between = replicate.audit.repeated if replicate.audit else {}
    for name in dict.fromkeys(("latency_s", "ttft_s", primary)):
        if not fresh.get(name) or name not in replicate.samples:
            continue
        fresh_times, times = _times(name, fresh[name]), _times(name, replicate.samples[name])
        rounds = np.split(times, list(accumulate(replicate.rounds))[:-1])
        repeated = max(max(np.median(each), each[: len(fresh_times)].min()) for each in rounds)
        repeated = max((repeated, *_times(name, between.get(name, ()))))
        if fresh_times.min() > CACHED_RATIO * repeated:
            return Disturbance(
                f"Requests with fresh inputs took at least {fresh_times.min() / repeated:.1f} times as long as "
                f"repeated ones ({name})",
                "outputs were cached: disable the cache",
            )
    return None


def _drifted(primary: str, replicates: Sequence[Replicate]) -> str | None:
    """Over all replicates in their order: a change that ends within one of them is part of the interval."""
    if sum(sample.wall_s for replicate in replicates for sample in replicate.host_samples) < DRIFT_FROM_S:
        return None
    change = drift(np.concatenate([_times(primary, each.samples[primary]) for each in replicates]))
    if change is None:
        return None
    slower = "slower" if change > 0 else "faster"
    return (
        f"Requests became {slower} while they were timed: the last third took {1 + change:.2f} times as long as the "
        "first; let the machine settle and measure again."
    )


def _interrupted(primary: str, replicate: Replicate) -> Disturbance | None:
    """A whole request took far longer than the median. A warm request says how many seconds that is."""
    slept = disturbance.suspended(replicate.host_samples)
    if slept:
        return slept
    whole = "latency_s" if "latency_s" in replicate.samples else primary
    times = _times(whole, replicate.samples[whole])
    longest = float(times.max() / np.median(times))
    stopped_s = (longest - 1) * replicate.ready.request_s
    if longest <= STOPPED_RATIO or stopped_s <= STOPPED_S:
        return None
    return Disturbance(
        f"A request was stopped for about {stopped_s:.1f} s",
        "do not stop or debug the measuring process, and measure again",
    )


def _doubts(spec: JobSpec, variant: Variant, replicates: Sequence[Replicate]) -> dict[VerdictWarning, str]:
    """Warnings about the samples themselves."""
    found = {}
    if len(replicates) == 1:
        found[VerdictWarning.SINGLE_REPLICATE] = (
            "One process was measured, and others may differ by more than its interval; set measure.replicates to 2 "
            "or more."
        )
    unsettled = [number for number, r in enumerate(replicates, 1) if not _converged(r, spec)]
    if unsettled:
        found[VerdictWarning.NOT_CONVERGED] = (
            f"In {_numbered(unsettled)} the requests were not steady, or the median's interval was still wider than "
            f"{100 * spec.measure.rel_ci:g}% of the median when the time was up; raise measure.max_seconds."
        )
    requests = sum(len(replicate.samples[variant.workload.primary]) for replicate in replicates)
    if requests < fewest_for(50):
        found[VerdictWarning.FEW_SAMPLES] = (
            f"{_requests(requests)} too few for a percentile; {fewest_for(50)} are needed."
        )
    return found


def _requests(count: int) -> str:
    return "1 request is" if count == 1 else f"{count} requests are"


def _converged(replicate: Replicate, spec: JobSpec) -> bool:
    return replicate.ready.steady and replicate.width <= spec.measure.rel_ci


def _times(name: str, samples: Iterable[float]) -> Array:
    """A metric's samples as times, [requests]: a rate counts by its inverse."""
    values = np.fromiter(samples, dtype=np.float64)
    return values if METRICS[name].better is Better.LOWER else 1 / values
