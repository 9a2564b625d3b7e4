"""Whether a variant's result is valid: reasons make it invalid, warnings only mark it, and each has a note."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from optigpu.conductor.verdicts import contradictions, disturbance
from optigpu.conductor.verdicts.cost import Evidence
from optigpu.conductor.verdicts.disturbance import Disturbance
from optigpu.conductor.verdicts.outside import Outside, disturbed_readings, first, from_outside, numbered
from optigpu.documents.facts import BuildFacts, LossQuality
from optigpu.documents.result import MetricSummary, Verdict, VerdictReason, VerdictWarning
from optigpu.documents.rounds import LoadRun, grew_in_most
from optigpu.job.spec import JobSpec, Variant
from optigpu.meters.latency import WARMUP_AGREEMENT
from optigpu.statistics.intervals import fewest_for
from optigpu.vocabulary import METRICS, Better

WHOLLY_QUANTIZED = 0.9
"""From this share of the weights on a technique of weights needs no warning; the rest are norms, biases, routers."""
SINGLE_REPLICATE = (
    "One process was measured, and others may differ by more than its interval; set measure.replicates to 2 or "
    "more."
)
_CONTRADICTIONS: Mapping[VerdictReason, Callable[[Variant, Evidence], Disturbance | None]] = {
    VerdictReason.CLOCK_CONTRADICTED: contradictions.clock,
    VerdictReason.WARM_UP_SLEPT: contradictions.slept,
    VerdictReason.WORKED_WHILE_IDLE: contradictions.idle_work,
    VerdictReason.UNDECLARED_ROUNDING: contradictions.rounding,
    VerdictReason.NOT_THE_MODEL: contradictions.another_model,
    VerdictReason.WRONG_DEVICE: contradictions.elsewhere,
}
"""What contradicts what a variant is said to be."""


def judge(
    spec: JobSpec,
    variant: Variant,
    evidence: Sequence[Evidence],
    metrics: Mapping[str, MetricSummary],
    builds: Sequence[BuildFacts] = (),
) -> Verdict:
    """The verdict on a variant whose replicates were all measured and summarised as `metrics`; `builds` are what its
    libraries were built with."""
    outside = from_outside(variant.workload.primary, evidence)
    reasons = _reasons(spec, variant, evidence, metrics, outside)
    noted = _doubts(spec, variant, evidence, metrics) | _marks(evidence, outside)
    # What a library could do on this machine and cannot, with the command that builds it right.
    notes = [
        f"{each.library} of {each.package} lacks {' and '.join(each.lacks)}, which this machine has, so its speed says "
        f"little of what it can do; build it with: {each.build}"
        for each in builds
        if each.lacks
    ]
    noted[VerdictWarning.HANDICAPPED_BUILD] = " ".join(notes)
    warnings = {warning: note for warning, note in noted.items() if note}
    return Verdict(
        valid=not reasons,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        notes=tuple(map(_sentence, (*reasons.values(), *warnings.values()))),
        cost_bound=outside.bound,
    )


def _reasons(
    spec: JobSpec,
    variant: Variant,
    evidence: Sequence[Evidence],
    metrics: Mapping[str, MetricSummary],
    outside: Outside,
) -> dict[VerdictReason, str]:
    primary = variant.workload.primary
    gates = (
        _gate("kld_mean", "max_kld", spec.limits.max_kld, metrics),
        _gate("top1_agreement", "min_top1", spec.limits.min_top1, metrics),
    )
    found = {
        VerdictReason.OUTPUT_INVALID: _wrong_outputs(evidence),
        VerdictReason.QUALITY_BELOW_GATE: " ".join(filter(None, gates)),
        VerdictReason.LOSS_DIVERGED: loss_diverged(evidence),
        VerdictReason.LITTLES_LAW: unlawful_load(evidence),
        VerdictReason.CACHED_RESULT: first(lambda each: contradictions.cached(primary, each), evidence),
        VerdictReason.HARNESS_REPLACED: first(contradictions.replaced, evidence),
        **{reason: first(partial(found, variant), evidence) for reason, found in _CONTRADICTIONS.items()},
        **outside.reasons,
    }
    return {reason: note for reason in VerdictReason if (note := found.get(reason))}


def _marks(evidence: Sequence[Evidence], outside: Outside) -> dict[VerdictWarning, str | None]:
    shared = first(lambda each: disturbance.beside_another_job(each.samples), evidence)
    if not shared and not outside.says_stolen:
        shared = first(lambda each: disturbance.stolen(each.samples), evidence)
    return {
        VerdictWarning.DISTURBED: " ".join(filter(None, [_disturbed(outside), disturbed_readings(evidence)])),
        VerdictWarning.CLOCK_UNSTABLE: first(lambda each: disturbance.unstable(each.samples), evidence),
        VerdictWarning.SHARED_HOST: shared,
        VerdictWarning.SATURATED: saturated_queue(evidence),
        VerdictWarning.SATURATION_UNDECIDED: undecided_saturation(evidence),
    }


def _disturbed(outside: Outside) -> str | None:
    if not outside.marks:
        return None
    percent = 100 * (outside.bound or 0.0)
    cost = "less than 1%" if percent < 1 else f"up to {percent:.0f}%"
    return (
        f"{' '.join(outside.marks)} This can have cost {cost} of the speed, and the intervals reach that far."
    )


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _wrong_outputs(evidence: Sequence[Evidence]) -> str | None:
    replicates = [each.replicate for each in evidence]
    ready = (replicate.ready.problem for replicate in replicates)
    audited = (replicate.audit.problem for replicate in replicates if replicate.audit)
    problems = dict.fromkeys(problem for problem in (*ready, *audited) if problem)
    sentences = [
        *map(_sentence, problems),
        *filter(None, [loss_not_finite(evidence), failed_queries(evidence)]),
    ]
    return " ".join(sentences) or None


def _gate(name: str, limit: str, bound: float | None, metrics: Mapping[str, MetricSummary]) -> str | None:
    """A limit that could not be checked counts as exceeded."""
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


def _doubts(
    spec: JobSpec, variant: Variant, evidence: Sequence[Evidence], metrics: Mapping[str, MetricSummary]
) -> dict[VerdictWarning, str | None]:
    unsettled = [_unsteady(evidence), _too_wide(spec.measure.rel_ci, evidence, metrics.get(variant.primary))]
    found: dict[VerdictWarning, str | None] = {
        VerdictWarning.SINGLE_REPLICATE: SINGLE_REPLICATE if len(evidence) == 1 else None,
        VerdictWarning.NOT_CONVERGED: " ".join(filter(None, unsettled)),
    }
    requests = counted_queries(evidence) or sum(
        len(each.times(variant.workload.primary)) for each in evidence
    )
    if requests < fewest_for(50):
        found[VerdictWarning.FEW_SAMPLES] = (
            f"{requests} request{' is' if requests == 1 else 's are'} too few for a percentile; "
            f"{fewest_for(50)} are needed."
        )
    weights = list(filter(None, (each.replicate.ready.facts.weights for each in evidence)))
    shares = [each.quantized for each in weights if each.quantized is not None]
    partly = [
        f"{100 * share:.0f}% of the weights are quantized" for share in shares if share < WHOLLY_QUANTIZED
    ]
    if partly:
        found[VerdictWarning.PARTLY_QUANTIZED] = f"{partly[0]}; the others stayed as they were loaded."
    unused = [each.unused for each in weights if each.unused is not None]
    if unused:
        found[VerdictWarning.UNUSED_TENSORS] = (
            f"The checkpoint has tensors that the model does not compute with: {unused[0]}."
        )
    return found


def _unsteady(evidence: Sequence[Evidence]) -> str | None:
    numbers = [each.number for each in evidence if not each.replicate.ready.steady]
    if not numbers:
        return None
    apart = f"{100 * WARMUP_AGREEMENT:g}%"
    return f"In {numbered(numbers)} the last requests of the warm-up still differed by more than {apart}."


def _too_wide(rel_ci: float, evidence: Sequence[Evidence], figure: MetricSummary | None) -> str | None:
    """A figure that its processes agree on as closely as was asked for is known, whatever each one is by itself."""
    numbers = [each.number for each in evidence if not each.replicate.settled]
    if not numbers:
        return None
    if len(evidence) > 1 and figure is not None and figure.value and figure.ci is not None:
        low, high = figure.ci
        if (high - low) / abs(figure.value) <= rel_ci:
            return None
    return (
        f"In {numbered(numbers)} the median's interval was not known to be as narrow as {100 * rel_ci:g}% of the "
        "median when the time was up; raise measure.max_seconds, and limits.timeout_s where it limited the job."
    )


def failed_queries(evidence: Sequence[Evidence]) -> str | None:
    """How many queries were not answered, and why the first was not."""
    runs = [run for run in _runs(evidence) if run.failed]
    if not runs:
        return None
    count, of = sum(run.failed for run in runs), sum(run.queries for run in _runs(evidence))
    return f"{count} of {of} requests failed: {runs[0].error}"


def counted_queries(evidence: Sequence[Evidence]) -> int:
    """How many queries figures come from; 0 where requests are no runs of a load."""
    runs = (run for each in evidence for run in each.selection.of(each.replicate.loads))
    return sum(len(run.sent_s) for run in runs)


def unlawful_load(evidence: Sequence[Evidence]) -> str | None:
    """The run whose counts contradict each other."""
    wrong = next((run.law for run in _runs(evidence) if not run.law.holds), None)
    if wrong is None:
        return None
    return (
        f"Little's law does not hold: {wrong.counted:.4g} requests were counted under way on average, and by their "
        f"rate of {wrong.rate:.4g}/s and their time in the server of {wrong.latency_s - wrong.late_s:.4g} s there were "
        f"{wrong.expected:.4g}, which is further off than {wrong.tolerance:.2g}; some were lost or counted twice, or a "
        "clock jumped."
    )


def saturated_queue(evidence: Sequence[Evidence]) -> str | None:
    """That the queue grew without an end in most runs, by those of the rounds that nothing disturbed."""
    growth = _growth(_undisturbed(evidence))
    return growth and (
        f"{growth}: requests come faster than they are served, and latencies depend on how long a run lasts; ask for a "
        "lower rate."
    )


def undecided_saturation(evidence: Sequence[Evidence]) -> str | None:
    """That the queue grew in most runs, and that every round was disturbed, so that it may have grown for that."""
    growth = None if _undisturbed(evidence) else _growth(list(_runs(evidence)))
    return growth and (
        f"{growth}, and every round was disturbed, which lets a queue grow too: whether requests come faster than they "
        "are served is undecided; measure again while the machine rests."
    )


def _growth(runs: Sequence[LoadRun]) -> str | None:
    if not grew_in_most(runs):
        return None
    known = sum(run.saturated is not None for run in runs)
    grown = sorted(run.growth or 0.0 for run in runs if run.saturated)
    return (
        f"The queue grew in {len(grown)} of {known} runs, by {grown[len(grown) // 2]:.2g} requests a second"
    )


def _undisturbed(evidence: Sequence[Evidence]) -> list[LoadRun]:
    return [run for each in evidence for run in each.selection.unmarked(each.replicate.loads)]


def _runs(evidence: Sequence[Evidence]) -> Iterator[LoadRun]:
    return (run for each in evidence for run in each.replicate.loads)


def loss_diverged(evidence: Sequence[Evidence]) -> str | None:
    """Where the losses left the band, and how far; None where they did not, or were not compared."""
    return next((note for found in _compared(evidence) if (note := _out_of_band(found))), None)


def loss_not_finite(evidence: Sequence[Evidence]) -> str | None:
    """The step whose loss is not a number, while losses were compared."""
    steps = (found.not_finite_step for found in _compared(evidence))
    step = next((step for step in steps if step is not None), None)
    if step is None:
        return None
    return f"The loss of step {step} of training is not finite; lower the learning rate, or leave the technique out."


def _out_of_band(found: LossQuality) -> str | None:
    if found.course is None or found.jitter is None:
        return None
    notes = []
    if found.course > 1:
        notes.append(
            f"Over a quarter of {len(found.losses)} steps the mean loss is {found.course:.1f} times as far from "
            f"fp32's on the same samples as the band of {found.band:.2g} nat allows, which {found.seeds} seeds of fp32 "
            "make; lower the learning rate, or leave the technique out."
        )
    if found.jitter > 1:
        notes.append(
            f"From step to step the losses jump about fp32's on the same samples {found.jitter:.1f} times as much as "
            "they may, as they do where samples are left out."
        )
    return " ".join(notes) or None


def _compared(evidence: Sequence[Evidence]) -> Iterator[LossQuality]:
    for each in evidence:
        for metered in each.replicate.metered:
            if isinstance(metered.facts.quality, LossQuality):
                yield metered.facts.quality
