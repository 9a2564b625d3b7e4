"""Whether a variant's figures count: reasons make its result invalid, warnings mark it, each with a note."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts import disturbance
from optigpu.documents.result import MetricSummary, Verdict, VerdictReason, VerdictWarning
from optigpu.job.spec import JobSpec, Limits, Variant
from optigpu.statistics.drift import Array, drift
from optigpu.statistics.intervals import fewest_for
from optigpu.vocabulary import METRICS, Better

CACHED_RATIO = 1.5
"""A request with inputs that nobody saw before may take so many times what a repeated one takes."""
DRIFT_FROM_S = 15.0
"""Of rounds, all replicates together: within seconds a virtual machine wanders by half, which its interval shows."""
STOPPED_RATIO, STOPPED_S = 20.0, 1.0
"""A request that takes so many times the median, and so many seconds more, was stopped from outside."""

Detector = Callable[[Replicate], str | None]
"""What it found in a replicate, as the end of a sentence that begins "In replicate 1"."""


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
    """What a detector found, with the numbers of the replicates; the figures are those of the first one."""
    found = {number: note for number, each in enumerate(replicates, 1) if (note := detector(each))}
    if not found:
        return None
    first, *others = found
    also = f" (and in replicate {', '.join(map(str, others))})" if others else ""
    return f"In replicate {first}{also} {found[first]}"


def _wrong_outputs(replicates: Sequence[Replicate]) -> str | None:
    """Each different problem once: processes that do the same wrong thing say the same."""
    ready = (replicate.ready.problem for replicate in replicates)
    audited = (replicate.audit.problem for replicate in replicates if replicate.audit)
    problems = dict.fromkeys(problem for problem in (*ready, *audited) if problem)
    return " ".join(problems) or None


def _below_gate(limits: Limits, metrics: Mapping[str, MetricSummary]) -> str | None:
    """A gate that could not be checked is not passed."""
    gates = (("kld_mean", "max_kld", limits.max_kld), ("top1_agreement", "min_top1", limits.min_top1))
    return " ".join(filter(None, (_gate(*gate, metrics) for gate in gates))) or None


def _gate(name: str, limit: str, bound: float | None, metrics: Mapping[str, MetricSummary]) -> str | None:
    if bound is None:
        return None
    summary = metrics.get(name)
    if summary is None or summary.value is None:
        why = summary.reason if summary and summary.reason else "It was not measured."
        return f"limits.{limit} is set, but there is no {name} to hold against it: {why}"
    lower = METRICS[name].better is Better.LOWER
    if summary.value <= bound if lower else summary.value >= bound:
        return None
    side = "above" if lower else "below"
    return f"The {name} of {summary.value:.4g} is {side} limits.{limit}, which is {bound:g}."


def _cached(primary: str, replicate: Replicate) -> str | None:
    """Even the fastest request with fresh inputs took much longer than the repeated ones.

    They are held against the slowest round, since the machine may have slowed down by then, and against the first
    requests of a round, which come out of a rest as the audit's do; and against repeated ones between them, where there
    are any.
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
            return (
                f"requests with fresh inputs took at least {fresh_times.min() / repeated:.1f} times as long as "
                f"repeated ones ({name}), so answers were kept; leave out what keeps them."
            )
    return None


def _drifted(primary: str, replicates: Sequence[Replicate]) -> str | None:
    """Over all replicates in their order: what passes within one of them is in the interval between them."""
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


def _interrupted(primary: str, replicate: Replicate) -> str | None:
    """A whole request took far longer than the median; how long that is in seconds, a warm request tells."""
    slept = disturbance.suspended(replicate.host_samples)
    if slept:
        return slept
    whole = "latency_s" if "latency_s" in replicate.samples else primary
    times = _times(whole, replicate.samples[whole])
    longest = float(times.max() / np.median(times))
    stopped_s = (longest - 1) * replicate.ready.request_s
    if longest <= STOPPED_RATIO or stopped_s <= STOPPED_S:
        return None
    return f"a request stood still for about {stopped_s:.1f} s; leave the process running while it measures."


def _doubts(spec: JobSpec, variant: Variant, replicates: Sequence[Replicate]) -> dict[VerdictWarning, str]:
    """How far the samples themselves are to be trusted."""
    found = {}
    if len(replicates) == 1:
        found[VerdictWarning.SINGLE_REPLICATE] = (
            "One process was measured; others may differ by more than its interval."
        )
    unsettled = [str(number) for number, r in enumerate(replicates, 1) if not _converged(r, spec)]
    if unsettled:
        found[VerdictWarning.NOT_CONVERGED] = (
            f"In replicate {', '.join(unsettled)} the requests had not settled, or the median's interval was still "
            f"wider than {spec.measure.rel_ci:g} of it when the time was over."
        )
    requests = sum(len(replicate.samples[variant.workload.primary]) for replicate in replicates)
    if requests < fewest_for(50):
        found[VerdictWarning.FEW_SAMPLES] = f"Too few requests for any percentile: {requests}."
    return found


def _converged(replicate: Replicate, spec: JobSpec) -> bool:
    return replicate.ready.steady and replicate.width <= spec.measure.rel_ci


def _times(name: str, samples: Iterable[float]) -> Array:
    """What a metric's samples are as times: a rate counts by its inverse. Shape: [requests]."""
    values = np.fromiter(samples, dtype=np.float64)
    return values if METRICS[name].better is Better.LOWER else 1 / values
