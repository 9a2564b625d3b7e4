"""Compares two results, as they were stored: each metric's ratio, its 95% interval, and whether the difference is real.

Only summaries are read, never samples, so that a service can compare on every request. An interval comes from what both
sides have, the first of: parts of the same text, processes that were measured side by side (both in pairs), several
processes, or the two values' own intervals (`optigpu.statistics.evidence`). Where turns say the ratio of each pair of
processes, the ratio is the mean of these, and not that of the two values. What is counted and not measured
(COUNTED_METRICS) is compared exactly.

Two results are equivalent if two one-sided tests at 5% say that their ratio is within the margin (Schuirmann, A
Comparison of the Two One-Sided Tests Procedure and the Power Approach, 1987), that is, if the 90% interval is; else
different if the 95% interval leaves 1 out; else nothing is decided.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from pydantic import ValidationError

from optigpu.documents.older import current
from optigpu.documents.views import ComparedResult, Comparison, Decision, Difference, MetricComparison
from optigpu.statistics.estimates import Estimate
from optigpu.statistics.evidence import evidence_of
from optigpu.statistics.intervals import factor_bounds
from optigpu.statistics.stored import StoredResult, StoredSummary
from optigpu.vocabulary import COUNTED_METRICS, Better, Document, OptiGPUError, canonical_json

DIFFERENCES = ("perplexity_delta", "accuracy_loss_percent")
"""What is a difference from fp32 already, and may have either sign."""
ON_A_TEXT = (
    "kld_mean", "kld_p99", "top1_agreement", "perplexity", "accuracy", *DIFFERENCES,
)  # fmt: skip
"""Metrics that depend on the text that they were measured on."""

OTHER_TEXT = "Quality was measured on different texts."
NO_INTERVAL = (
    "There is no interval: a value has none of its own, its interval includes zero, or one side has twice the other's "
    "processes or more."
)
SINGLE_REPLICATE = (
    "single_replicate: a value comes from one process, which does not show how much processes differ. They are taken "
    "to differ by 5%, and nothing is called equivalent."
)


class NotComparableError(OptiGPUError):
    """Two results differ in workload, weights, hardware or source, or cannot be read."""


def compare(baseline: Document, candidate: Document, *, anyway: bool = False) -> Comparison:
    """Compares two results, as they were stored, in the metrics that both have.

    Raises NotComparableError when workload, weights, hardware or source differ; with `anyway` these are notes instead.
    """
    ours, theirs = _read(baseline, "baseline"), _read(candidate, "candidate")
    obstacles = tuple(_obstacles(ours, theirs))
    if obstacles and not anyway:
        raise NotComparableError(f"{' '.join(obstacles)} Use `anyway` to compare them regardless.")
    first = ours.variant.primary_metric
    names = sorted((name for name in ours.metrics if name in theirs.metrics), key=lambda name: name != first)
    return Comparison(
        baseline=_side(ours),
        candidate=_side(theirs),
        primary_metric=first,
        margin=MARGIN,
        metrics={name: _compared(name, ours, theirs) for name in names},
        notes=(*obstacles, *_doubts(ours, "baseline"), *_doubts(theirs, "candidate")),
        differences=tuple(_differences(baseline, candidate)),
    )


def _read(document: Document, side: str) -> StoredResult:
    try:
        return StoredResult.model_validate(current(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise NotComparableError(
            f"The {side} cannot be read as a result ({place}: {first['msg']})."
        ) from error


def _side(result: StoredResult) -> ComparedResult:
    return ComparedResult(
        id=result.id,
        label=result.variant.label,
        model=result.variant.model,
        workload=result.variant.workload,
        hardware=result.environment.hardware_class,
        valid=result.verdict.valid,
        warnings=result.verdict.warnings,
    )


def _obstacles(baseline: StoredResult, candidate: StoredResult) -> Iterator[str]:
    """Why the two results are not comparable."""
    ours, theirs = baseline.variant, candidate.variant
    if ours.workload_digest != theirs.workload_digest:
        shapes = [f"{canonical_json(each.workload)} on {each.model}" for each in (ours, theirs)]
        hashes = f"{baseline.weights} and {candidate.weights}"
        if shapes[0] == shapes[1]:
            yield f"The weights of {ours.model} differ: their hashes are {hashes}."
        else:
            yield f"The workloads differ: {' and '.join(shapes)}."
    here, there = baseline.environment.hardware_class, candidate.environment.hardware_class
    if here != there:
        yield f"The hardware differs: {here} and {there}."
    if baseline.source != candidate.source:
        yield f"The sources differ: {baseline.source} and {candidate.source}."


def _doubts(result: StoredResult, side: str) -> Iterator[str]:
    if not result.verdict.valid:
        yield f"The {side} is not valid: {', '.join(result.verdict.reasons)}."


def _compared(name: str, baseline: StoredResult, candidate: StoredResult) -> MetricComparison:
    ours, theirs = baseline.metrics[name], candidate.metrics[name]
    both = MetricComparison(unit=ours.unit, better=ours.better, baseline=ours.value, candidate=theirs.value)
    reason = _hindrance(ours, theirs)
    if reason is None and name in ON_A_TEXT and baseline.text != candidate.text:
        reason = OTHER_TEXT
    if reason is not None or ours.value is None or theirs.value is None:
        return both.model_copy(update={"reason": reason})
    if name in COUNTED_METRICS:
        return _exactly(both, ours.value, theirs.value)
    parts = (*baseline.without_part(name), *candidate.without_part(name))
    positive = min((*ours.figures, *theirs.figures, *parts)) > 0
    measured = _as_ratio if positive and name not in DIFFERENCES else _as_difference
    return measured(both, name, baseline, candidate)


def _hindrance(baseline: StoredSummary, candidate: StoredSummary) -> str | None:
    """Why two figures are not comparable, if they are not."""
    sides = {"baseline": baseline, "candidate": candidate}
    missing = {
        side: summary.reason or "not measured" for side, summary in sides.items() if summary.value is None
    }
    if len(missing) == 2 and missing["baseline"] == missing["candidate"]:
        return f"both: {missing['baseline']}"
    if missing:
        return "; ".join(f"{side}: {reason}" for side, reason in missing.items())
    if baseline.unit != candidate.unit:
        return f"The units differ: {baseline.unit} and {candidate.unit}."
    return None


def _exactly(both: MetricComparison, baseline: float, candidate: float) -> MetricComparison:
    found = {"ratio": candidate / baseline} if baseline else {"difference": candidate - baseline}
    decision = decide_exactly(baseline, candidate, both.better)
    return both.model_copy(update=found | {"decision": decision, "exact": True})


def _as_ratio(
    both: MetricComparison, name: str, baseline: StoredResult, candidate: StoredResult
) -> MetricComparison:
    assert both.baseline is not None
    assert both.candidate is not None
    evidence = evidence_of(name, baseline, candidate, as_ratio=True)
    ratio = (evidence and evidence.ratio) or both.candidate / both.baseline
    found = both.model_copy(update={"ratio": ratio})
    bounds = evidence and factor_bounds(ratio, evidence.estimate)
    if evidence is None or bounds is None:
        return _undecided(found, name, baseline, candidate)
    decision = decide_ratio(evidence.estimate, both.better, single_sides=evidence.single_sides)
    reason = SINGLE_REPLICATE if evidence.single_sides else None
    update = {"ci": bounds, "decision": decision, "paired": evidence.paired, "reason": reason}
    return found.model_copy(update=update)


def _as_difference(
    both: MetricComparison, name: str, baseline: StoredResult, candidate: StoredResult
) -> MetricComparison:
    assert both.baseline is not None
    assert both.candidate is not None
    found = both.model_copy(update={"difference": both.candidate - both.baseline})
    evidence = evidence_of(name, baseline, candidate, as_ratio=False)
    if evidence is None or evidence.single_sides:
        # What processes differ by is known as a ratio only.
        return _undecided(found, name, baseline, candidate)
    low, high = map(float, evidence.estimate.bounds())
    decision = decide_difference(evidence.estimate, both.better)
    update = {"ci": (low, high), "decision": decision, "paired": evidence.paired}
    return found.model_copy(update=update)


def _undecided(
    found: MetricComparison, name: str, baseline: StoredResult, candidate: StoredResult
) -> MetricComparison:
    sides = [result.metrics[name] for result in (baseline, candidate)]
    reasons = dict.fromkeys(side.reason for side in sides if side.ci is None and side.reason)
    reason = " ".join(filter(None, reasons)) or NO_INTERVAL
    return found.model_copy(update={"decision": Decision.UNDECIDED, "reason": reason})


def _differences(baseline: Document, candidate: Document) -> Iterator[Difference]:
    """The fields of environment, provenance and seed that differ."""
    ours, theirs = (
        _leaves({name: document.get(name) for name in ("environment", "provenance", "seed")})
        for document in (baseline, candidate)
    )
    for field in dict.fromkeys((*ours, *theirs)):
        if ours.get(field) != theirs.get(field):
            yield Difference(field=field, baseline=ours.get(field), candidate=theirs.get(field))


def _leaves(document: Document, path: str = "") -> dict[str, object]:
    """Every value that is not an object, by its dotted path."""
    found: dict[str, object] = {}
    for name, value in document.items():
        found |= _leaves(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return found


MARGIN = 0.03
"""Ratios between 1 / 1.03 and 1.03 count as equivalent."""
PROCESSES_DIFFER = 0.05
"""A single process is taken to differ from others of its variant by 5% (one standard deviation).

Measured are 2% (docs/results/repeatability.json); what is different with 5% is so with less.
"""


def decide_ratio(logarithm: Estimate, better: Better, *, single_sides: int = 0) -> Decision:
    """The decision from a ratio's logarithm. Single processes can show a difference and no equivalence."""
    if single_sides == 0 and _within_margin(logarithm):
        return Decision.EQUIVALENT
    return decide_difference(_among_others(logarithm, single_sides), better)


def decide_difference(estimate: Estimate, better: Better) -> Decision:
    """Better or worse if the 95% interval leaves 0 out."""
    low, high = map(float, estimate.bounds())
    if low <= 0 <= high:
        return Decision.EQUAL if low == high else Decision.UNDECIDED
    return direction(low, better)


def decide_exactly(baseline: float, candidate: float, better: Better) -> Decision:
    """The decision between two figures that are counted and not measured."""
    return Decision.EQUAL if baseline == candidate else direction(candidate - baseline, better)


def direction(change: float, better: Better) -> Decision:
    """Whether a rise or a fall is an improvement."""
    return Decision.BETTER if (change > 0) == (better is Better.HIGHER) else Decision.WORSE


def _within_margin(logarithm: Estimate) -> bool:
    low, high = map(float, logarithm.bounds(0.90))
    return low >= -math.log1p(MARGIN) and high <= math.log1p(MARGIN)


def _among_others(logarithm: Estimate, single_sides: int) -> Estimate:
    """With the variation between processes that a side of one process does not show."""
    if single_sides == 0:
        return logarithm
    own, others = logarithm.error**2, single_sides * PROCESSES_DIFFER**2
    # The variation between processes is taken as known: only its own part has few degrees of freedom.
    freedom = logarithm.freedom * ((own + others) / np.maximum(own, 1e-12)) ** 2
    return replace(logarithm, error=np.sqrt(own + others), freedom=freedom)
