"""The gain of each technique: each variant of a job against the baseline, against the previous rung, and the whole
stack against itself without the technique. Only results of the same workload are compared. A ratio has a verdict of its
own: variants that took turns share what disturbed them, so that their ratio holds where their speeds do not."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from optigpu.documents.result import (
    OF_THE_OUTPUT,
    Attribution,
    AttributionRow,
    Gain,
    Outcome,
    Payback,
    Result,
    Samples,
    VerdictReason,
)
from optigpu.job.plan import without
from optigpu.job.spec import JobSpec, PlanName, Variant, resolve
from optigpu.statistics.intervals import paired_ratio, ratio, value_of
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.vocabulary import METRICS, Better

Way = tuple[str, str | None, tuple[Technique, ...]]
"""How a workload was done: an engine's name, the workload's implementation if it has several, and the techniques."""
Gains = Mapping[int, tuple[float, ...]]
"""By the index of the variant that they are over."""


def attribute(
    spec: JobSpec, variants: Sequence[Variant], outcomes: Mapping[int, Outcome], again: Samples = ()
) -> Attribution:
    """The gains of a job's variants, from the outcomes that are known, each by its variant's index. `again` is what the
    baseline measured once more at the end, where not all variants were side by side. A variant without an outcome has
    no row. `best` is None where a job has several workloads: they do not compare."""
    ended = [variant for variant in variants if variant.index in outcomes]
    groups: dict[str, dict[Way, Variant]] = {}
    for variant in ended:
        way = (variant.engine, variant.workload.implementation, variant.stack)
        groups.setdefault(variant.workload_digest, {})[way] = variant
    comparisons = {
        workload: _Comparison(spec, by_way, {v.index: _side_of(outcomes[v.index]) for v in by_way.values()})
        for workload, by_way in groups.items()
    }
    return Attribution(
        metric=spec.primary,
        rows=tuple(
            _row(variant, outcomes[variant.index], comparisons[variant.workload_digest]) for variant in ended
        ),
        best=next(iter(comparisons.values())).best() if len(comparisons) == 1 else None,
        baseline_again=next(iter(comparisons.values())).repeated(again) if again and comparisons else None,
    )


@dataclass(frozen=True)
class _Side:
    """What one variant brings to a ratio."""

    # Of the primary metric; empty without a result.
    samples: Samples = ()
    # Why its own figure is not valid.
    reasons: frozenset[VerdictReason] = frozenset()
    # What disturbances can have cost its speed at most; None: no bound is known.
    cost: float | None = 0.0
    # The variants whose processes were resident together with this one's, replicate by replicate.
    together: frozenset[int] = frozenset()
    # How many times better than each of them it is, process by process; empty where turns do not say.
    gains: Gains = field(default_factory=dict)
    # The seconds of each request, and the gains of these; empty where the workload does not measure them.
    request_s: Samples = ()
    request_gains: Gains = field(default_factory=dict)
    # None: nothing was compiled.
    compile_s: float | None = None


@dataclass(frozen=True)
class _Comparison:
    """The variants of one workload by how they did it, and the sides of their ratios by index."""

    spec: JobSpec
    by_way: dict[Way, Variant]
    sides: dict[int, _Side]

    @property
    def baseline(self) -> Variant | None:
        """The job's own backend with no technique; with the plan `single`, which has no such variant, its stack."""
        return self._of(self.spec.stack if self.spec.plan is PlanName.SINGLE else ())

    def _of(self, stack: Iterable[Technique]) -> Variant | None:
        way = self.spec.engine, self.spec.workload.reference, resolve(stack, self.spec.workload.kind)
        return self.by_way.get(way)

    def over_compiled(self, variant: Variant) -> Gain | None:
        compiled = variant.workload.compiled
        return (
            self.gain(variant, self.by_way.get((variant.engine, compiled, variant.stack)))
            if compiled
            else None
        )

    def repeated(self, again: Samples) -> Gain | None:
        """The baseline at the end over itself at the start: a ratio far from 1 means that the machine changed during
        the job."""
        baseline = self.baseline
        if baseline is None or not self.sides[baseline.index].samples:
            return None
        first = self.sides[baseline.index]
        return self._ratio(_Side(again), first, baseline.index, self._better)

    def gain(self, candidate: Variant, reference: Variant | None) -> Gain | None:
        """None where either has no samples, or both are the same."""
        if reference is None or reference.index == candidate.index:
            return None
        ours, theirs = self.sides[candidate.index], self.sides[reference.index]
        if not (ours.samples and theirs.samples):
            return None
        return self._ratio(ours, theirs, reference.index, self._better)

    def _ratio(self, ours: _Side, theirs: _Side, reference: int, direction: Better) -> Gain:
        better, worse = (ours, theirs) if direction is Better.HIGHER else (theirs, ours)
        reasons = ours.reasons | theirs.reasons
        if reference in ours.together:
            reasons &= OF_THE_OUTPUT
            # A job that stopped may have left one of them with fewer replicates.
            pairs = min(len(ours.samples), len(theirs.samples))
            of_turns = ours.gains.get(reference, ())
            quotient, bounds = paired_ratio(better.samples[:pairs], worse.samples[:pairs], of_turns)
        else:
            quotient, bounds = ratio(better.samples, worse.samples)
        listed = tuple(reason for reason in VerdictReason if reason in reasons)
        reaching = None
        if bounds is not None and ours.cost is not None and theirs.cost is not None:
            # Up to where it would be if one side alone had not been disturbed: turns share a load, and yet the side
            # whose threads meet more often loses more.
            reaching = bounds[0] * (1 - theirs.cost), bounds[1] / (1 - ours.cost)
        return Gain(ratio=quotient, ci=reaching, compared_with=reference, reasons=listed)

    def reference_of(self, technique: Technique) -> Variant | None:
        """The variant that a technique alone is compared with: the baseline, or the variant of its `compared_with`."""
        return self._of(TECHNIQUES[name](name=name) for name in technique.compared_with)

    def rung_before(self, variant: Variant) -> Variant | None:
        """The last prefix of the stack that was measured before the one that this variant is, if it is one. A prefix
        whose output is wrong is passed over if there is another."""
        if self.spec.plan is PlanName.SEARCH:
            return None
        measured: list[Variant] = []
        for length in range(len(self.spec.stack) + 1):
            rung = self._of(self.spec.stack[:length])
            if rung is variant:
                right = [each for each in measured if not self.sides[each.index].reasons & OF_THE_OUTPUT]
                return next(reversed(right or measured), None)
            if rung is not None and self.sides[rung.index].samples:
                measured.append(rung)
        return None

    def left_out(self, technique: Technique) -> Gain | None:
        """What the whole stack gains over itself without that technique; None in a plan that does not ask for it."""
        if self.spec.plan not in (PlanName.ABLATION, PlanName.GRID):
            return None
        whole = self._of(self.spec.stack)
        rest = self._of(without(self.spec, technique)[1])
        return self.gain(whole, rest) if whole else None

    def payback(self, variant: Variant, references: Sequence[Variant | None]) -> Payback | None:
        """Against the first of these references that compiled nothing."""
        ours = self.sides[variant.index]
        plain = (each for each in references if each and self.sides[each.index].compile_s is None)
        reference = next((each for each in plain if self.sides[each.index].request_s), None)
        if ours.compile_s is None or reference is None or not ours.request_s:
            return None
        theirs = self.sides[reference.index]
        quotient = self._ratio(
            replace(ours, samples=ours.request_s, gains=ours.request_gains),
            replace(theirs, samples=theirs.request_s),
            reference.index,
            Better.LOWER,
        )
        # What compiling for `compile_s` means for requests of `request_s` whose speed it multiplied by the
        # gain's ratio: a request saves request_s * (ratio - 1).
        if quotient.ratio <= 1:
            why = "A step is no faster than without compiling, so that it is never paid back."
            return Payback(steps=None, compared_with=quotient.compared_with, reason=why)
        low, high = quotient.ci or (0.0, 0.0)
        requests = ours.compile_s / value_of(ours.request_s)
        why = "The ratio of the two has no interval above 1, so that it may never be paid back."
        return Payback(
            steps=requests / (quotient.ratio - 1),
            ci=(requests / (high - 1), requests / (low - 1)) if low > 1 else None,
            compared_with=quotient.compared_with,
            reason=None if low > 1 else why,
        )

    def best(self) -> int | None:
        """The best of the valid figures; where there is none, the one with the highest valid speedup."""
        figures = {
            index: value_of(side.samples)
            for index, side in self.sides.items()
            if side.samples and not side.reasons
        }
        if figures:
            choose = max if self._better is Better.HIGHER else min
            return choose(figures, key=lambda index: figures[index])
        baseline = self.baseline
        gains = {each.index: self.gain(each, baseline) for each in self.by_way.values()}
        ratios = {index: gain.ratio for index, gain in gains.items() if gain and gain.valid}
        if ratios and baseline:
            ratios[baseline.index] = 1.0
        return max(ratios, key=lambda index: ratios[index], default=None)

    @property
    def _better(self) -> Better:
        return METRICS[self.spec.primary].better


def _row(variant: Variant, outcome: Outcome, comparison: _Comparison) -> AttributionRow:
    alone = next(
        (t for t in comparison.spec.stack if resolve((t,), variant.workload.kind) == variant.stack), None
    )
    reference, before = comparison.reference_of(alone) if alone else None, comparison.rung_before(variant)
    left = comparison.left_out(alone) if alone else None
    result = outcome.result
    notes = result.verdict.reason_notes if result and not result.verdict.valid else None
    with_it = without(comparison.spec, alone)[0][1:] if alone and left else ()
    return AttributionRow(
        index=variant.index,
        role=variant.role,
        label=variant.label,
        status=outcome.status,
        reason=outcome.reason or (f"not valid: {' '.join(notes)}" if notes else None),
        technique=variant.rung or (alone.name if alone else None),
        speedup=comparison.gain(variant, comparison.baseline),
        alone=comparison.gain(variant, reference),
        added=comparison.gain(variant, before),
        left_out=left,
        left_out_with=tuple(each.name for each in with_it),
        over_compiled=comparison.over_compiled(variant),
        payback=comparison.payback(variant, (reference, before, comparison.baseline)),
        rough=outcome.rough,
    )


def _side_of(outcome: Outcome) -> _Side:
    result = outcome.result
    if result is None:
        return _Side()
    primary = result.variant.primary_metric
    # the time of a whole request; a workload may have none
    time = next((name for name in ("step_s", "latency_s") if name in outcome.samples), None)
    compiled = outcome.samples.get("compile_s")
    return _Side(
        samples=outcome.counted(primary),
        reasons=frozenset(result.verdict.reasons),
        cost=result.verdict.cost_bound,
        together=frozenset(result.facts.side_by_side),
        gains=_gains_of(result, primary),
        request_s=outcome.counted(time) if time else (),
        request_gains=_gains_of(result, time) if time else {},
        # of the process that compiled the longest: the others read from disk what it had compiled
        compile_s=max(max(each) for each in compiled) if compiled else None,
    )


def _gains_of(result: Result, metric: str) -> Gains:
    return result.metrics[metric].gains if metric in result.metrics else {}
