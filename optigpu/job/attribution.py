"""The gain of each technique: each variant of a job against the baseline, and against the previous rung.

Only valid results are compared, and only with others of the same workload.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optigpu.documents.result import Attribution, AttributionRow, Gain, Outcome, Samples
from optigpu.job.spec import JobSpec, PlanName, Variant, resolve
from optigpu.statistics.intervals import paired_ratio, ratio, value_of
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.vocabulary import METRICS, Better

Way = tuple[str, str | None, tuple[Technique, ...]]
"""How a workload was done: a backend's name, the workload's implementation if it has several, and the techniques."""


def attribute(
    spec: JobSpec, variants: Sequence[Variant], outcomes: Mapping[int, Outcome], again: Samples = ()
) -> Attribution:
    """The gains of a job's variants, from the outcomes that are known, each by its variant's index.

    `again` is what the baseline measured once more at the end, where not all variants were side by side. A variant
    without an outcome has no row. `best` is None where a job has several workloads: they do not compare.
    """
    ended = [variant for variant in variants if variant.index in outcomes]
    groups: dict[str, dict[Way, Variant]] = {}
    for variant in ended:
        way = (variant.backend, variant.workload.implementation, variant.stack)
        groups.setdefault(variant.workload_digest, {})[way] = variant
    comparisons = {
        workload: _Comparison(
            spec,
            by_way,
            {v.index: _valid_samples(outcomes[v.index]) for v in by_way.values()},
            {v.index: _side_by_side(outcomes[v.index]) for v in by_way.values()},
        )
        for workload, by_way in groups.items()
    }
    return Attribution(
        metric=spec.workload.primary,
        rows=tuple(
            _row(variant, outcomes[variant.index], comparisons[variant.workload_digest]) for variant in ended
        ),
        best=next(iter(comparisons.values())).best() if len(comparisons) == 1 else None,
        baseline_again=next(iter(comparisons.values())).repeated(again) if again and comparisons else None,
    )


@dataclass(frozen=True)
class _Comparison:
    """The variants of one workload by their stacks, and the primary metric's samples by index: empty if not valid."""

    spec: JobSpec
    by_way: dict[Way, Variant]
    samples: dict[int, Samples]
    together: dict[int, frozenset[int]]

    @property
    def baseline(self) -> Variant | None:
        """The job's own backend with no technique; with the plan `single`, which has no such variant, its stack."""
        if self.spec.plan is PlanName.SINGLE:
            return self._of(resolve(self.spec.stack, self.spec.workload.kind))
        return self._of(())

    def _of(self, stack: tuple[Technique, ...]) -> Variant | None:
        return self.by_way.get((self.spec.backend, self.spec.workload.reference, stack))

    def repeated(self, again: Samples) -> Gain | None:
        """The baseline at the end over itself at the start: a ratio far from 1 means that the machine changed during
        the job."""
        baseline = self.baseline
        if baseline is None or not self.samples[baseline.index]:
            return None
        first = self.samples[baseline.index]
        better, worse = (again, first) if self._better is Better.HIGHER else (first, again)
        quotient, bounds = ratio(better, worse, self.spec.seed)
        return Gain(ratio=quotient, ci=bounds, compared_with=baseline.index)

    def gain(self, candidate: Variant, reference: Variant | None) -> Gain | None:
        if reference is None or reference.index == candidate.index:
            return None
        ours, theirs = self.samples[candidate.index], self.samples[reference.index]
        if not ours or not theirs:
            return None
        better, worse = (ours, theirs) if self._better is Better.HIGHER else (theirs, ours)
        compared = paired_ratio if reference.index in self.together[candidate.index] else ratio
        quotient, bounds = compared(better, worse, self.spec.seed)
        return Gain(ratio=quotient, ci=bounds, compared_with=reference.index)

    def reference_of(self, technique: Technique) -> Variant | None:
        """The variant that a technique alone is compared with: the baseline, or the variant of its `compared_with`."""
        named = (TECHNIQUES[name](name=name) for name in technique.compared_with)
        return self._of(resolve(named, self.spec.workload.kind))

    def rung_before(self, variant: Variant) -> Variant | None:
        """The last prefix of the stack with a valid result before the one that this variant is, if it is one."""
        before: Variant | None = None
        for length in range(len(self.spec.stack) + 1):
            rung = self._of(resolve(self.spec.stack[:length], self.spec.workload.kind))
            if rung is variant:
                return before
            if rung is not None and self.samples[rung.index]:
                before = rung
        return None

    def best(self) -> int | None:
        values = {index: value_of(samples) for index, samples in self.samples.items() if samples}
        choose = max if self._better is Better.HIGHER else min
        return choose(values, key=lambda index: values[index], default=None)

    @property
    def _better(self) -> Better:
        return METRICS[self.spec.workload.primary].better


def _row(variant: Variant, outcome: Outcome, comparison: _Comparison) -> AttributionRow:
    alone = next(
        (t for t in comparison.spec.stack if resolve((t,), variant.workload.kind) == variant.stack), None
    )
    return AttributionRow(
        index=variant.index,
        role=variant.role,
        label=variant.label,
        status=outcome.status,
        reason=outcome.reason or _why_invalid(outcome),
        technique=variant.rung or (alone.name if alone else None),
        speedup=comparison.gain(variant, comparison.baseline),
        alone=comparison.gain(variant, comparison.reference_of(alone)) if alone else None,
        added=comparison.gain(variant, comparison.rung_before(variant)),
    )


def _valid_samples(outcome: Outcome) -> Samples:
    result = outcome.result
    return outcome.samples[result.variant.primary_metric] if result and result.verdict.valid else ()


def _side_by_side(outcome: Outcome) -> frozenset[int]:
    """The variants whose processes were resident together with this one's, replicate by replicate."""
    return frozenset(outcome.result.facts.side_by_side) if outcome.result else frozenset()


def _why_invalid(outcome: Outcome) -> str | None:
    result = outcome.result
    if result is None or result.verdict.valid:
        return None
    return f"not valid: {' '.join(result.verdict.notes)}"
