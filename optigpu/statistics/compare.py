"""Compares two results, as they were stored: each metric's ratio, its 95% interval, and whether the difference is real.

Only summaries are read, never samples, so that a service can compare on every request; whatever else a result holds is
ignored. An interval comes from what both sides have, the first of: parts of the same text, processes that were measured
side by side (both in pairs), several processes, or the two values' own intervals. Where turns say the ratio of each
pair of processes, the ratio is the mean of these, and not that of the two values. What is counted and not measured
(COUNTED_METRICS) is compared exactly.

Two results are equivalent if two one-sided tests at 5% say that their ratio is within the margin (Schuirmann, A
Comparison of the Two One-Sided Tests Procedure and the Power Approach, 1987), that is, if the 90% interval is; else
different if the 95% interval leaves 1 out; else nothing is decided.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from optigpu.documents.versions import current
from optigpu.documents.views import ComparedResult, Comparison, Decision, Difference, MetricComparison
from optigpu.statistics.estimates import (
    Array,
    Bounds,
    Estimate,
    difference,
    estimate_of_parts,
    factor_bounds,
    mean_of,
    t_quantile,
)
from optigpu.statistics.intervals import comparable
from optigpu.vocabulary import COUNTED_METRICS, Better, Document, Frozen, OptiGPUError, canonical_json


class _Read(Frozen):
    """A part of a document of an older or newer version."""

    model_config = ConfigDict(extra="ignore")


class StoredSummary(_Read):
    unit: str
    better: Better
    value: float | None
    ci: tuple[float, float] | None = None
    freedom: float | None = None
    replicates: int = 0
    per_replicate: tuple[float, ...] = ()
    # How many times the figure of each variant that was side by side this one is, process by process.
    beside: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    reason: str | None = None
    # How far `ci` was widened towards the undisturbed side; None where that has no bound.
    cost_bound: float | None = 0.0

    @property
    def disturbance(self) -> float:
        """The undisturbed value is between the value and so many times the value."""
        left = 1 - (self.cost_bound or 0.0)
        return left if self.better is Better.LOWER else 1 / left

    @property
    def measured_ci(self) -> tuple[float, float] | None:
        if self.ci is None:
            return None
        low, high = self.ci
        return (
            (low / self.disturbance, high) if self.better is Better.LOWER else (low, high / self.disturbance)
        )

    @property
    def figures(self) -> tuple[float, ...]:
        return (*self.per_replicate, *(() if self.value is None else (self.value,)))


class StoredVariant(_Read):
    index: int | None = None
    label: str
    workload: dict[str, object]
    model: str | None
    workload_digest: str
    primary_metric: str


class StoredVerdict(_Read):
    valid: bool
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class StoredEnvironment(_Read):
    hardware_class: str


class StoredProvenance(_Read):
    spec_digest: str | None = None
    weight_hash: str | None = None


class StoredQuality(_Read):
    """On what text quality was measured, and how far its figures move without a part of it."""

    tokens_sha256: str | None = None
    without_part: dict[str, tuple[float, ...]] = Field(default_factory=dict)


class StoredFacts(_Read):
    quality: StoredQuality | None = None
    side_by_side: tuple[int, ...] = ()


class StoredResult(_Read):
    id: str
    job_id: str | None = None
    source: str = "worker"
    variant: StoredVariant
    verdict: StoredVerdict
    metrics: dict[str, StoredSummary]
    environment: StoredEnvironment
    provenance: StoredProvenance | None = None
    facts: StoredFacts = StoredFacts()

    @property
    def text(self) -> str | None:
        return self.facts.quality.tokens_sha256 if self.facts.quality else None

    @property
    def weights(self) -> str:
        return (self.provenance and self.provenance.weight_hash) or "not recorded"

    @property
    def spec_digest(self) -> str | None:
        return self.provenance.spec_digest if self.provenance else None

    def without_part(self, name: str) -> tuple[float, ...]:
        """A quality figure without one part of its text after the other; empty if it has none."""
        return self.facts.quality.without_part.get(name, ()) if self.facts.quality else ()

    def factors_over(self, name: str, other: "StoredResult") -> tuple[float, ...]:
        """How many times the other's figure this one is, process by process; empty where turns do not say."""
        index = other.variant.index
        return (
            self.metrics[name].beside.get(index, ()) if index is not None and self.was_beside(other) else ()
        )

    def was_beside(self, other: "StoredResult") -> bool:
        """Whether the two are variants of one job whose processes took turns, replicate by replicate."""
        mine, its = self.variant.index, other.variant.index
        same_job = (self.job_id, self.spec_digest) == (other.job_id, other.spec_digest)
        return (
            same_job and mine != its and mine in other.facts.side_by_side and its in self.facts.side_by_side
        )


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
    """Compares two results, as they were stored, in the metrics that both have. Raises NotComparableError when
    workload, weights, hardware or source differ; with `anyway` these are notes instead."""
    ours, theirs = _read(baseline, "baseline"), _read(candidate, "candidate")
    obstacles = tuple(_obstacles(ours, theirs))
    if obstacles and not anyway:
        raise NotComparableError(f"{' '.join(obstacles)} Use `anyway` to compare them regardless.")
    doubts = [
        f"The {side} is not valid: {', '.join(result.verdict.reasons)}."
        for side, result in (("baseline", ours), ("candidate", theirs))
        if not result.verdict.valid
    ]
    first = ours.variant.primary_metric
    names = sorted((name for name in ours.metrics if name in theirs.metrics), key=lambda name: name != first)
    return Comparison(
        baseline=_side(ours),
        candidate=_side(theirs),
        primary_metric=first,
        margin=MARGIN,
        metrics={name: _compared(name, ours, theirs) for name in names},
        notes=(*obstacles, *doubts),
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


def _compared(name: str, baseline: StoredResult, candidate: StoredResult) -> MetricComparison:
    ours, theirs = baseline.metrics[name], candidate.metrics[name]
    both = MetricComparison(unit=ours.unit, better=ours.better, baseline=ours.value, candidate=theirs.value)
    reason = _hindrance(ours, theirs)
    if reason is None and name in ON_A_TEXT and baseline.text != candidate.text:
        reason = OTHER_TEXT
    if reason is not None or ours.value is None or theirs.value is None:
        return both.model_copy(update={"reason": reason})
    if name in COUNTED_METRICS:
        change = theirs.value - ours.value
        found = {"ratio": theirs.value / ours.value} if ours.value else {"difference": change}
        decision = direction(change, both.better) if change else Decision.EQUAL
        return both.model_copy(update=found | {"decision": decision, "exact": True})
    parts = (*baseline.without_part(name), *candidate.without_part(name))
    positive = min((*ours.figures, *theirs.figures, *parts)) > 0
    as_ratio = positive and name not in DIFFERENCES
    change = theirs.value / ours.value if as_ratio else theirs.value - ours.value
    return _decided(both, name, change, baseline, candidate, as_ratio=as_ratio)


def _hindrance(baseline: StoredSummary, candidate: StoredSummary) -> str | None:
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


def _decided(
    both: MetricComparison,
    name: str,
    change: float,
    baseline: StoredResult,
    candidate: StoredResult,
    *,
    as_ratio: bool,
) -> MetricComparison:
    """With the change, a ratio or else a difference, and what the evidence says of it."""
    evidence = evidence_of(name, change, baseline, candidate, as_ratio=as_ratio)
    bounds: Bounds | None = None
    decision = Decision.UNDECIDED
    chance = None
    if as_ratio and evidence:
        change = evidence.ratio or change
        bounds = factor_bounds(change, evidence.estimate)
        decision = decide_ratio(evidence.estimate, both.better, single_sides=evidence.single_sides)
        chance = with_processes(evidence.estimate, evidence.single_sides).chance()
    elif evidence and not evidence.single_sides:  # what processes differ by is known as a ratio only
        chance = evidence.estimate.chance()
        low, high = map(float, evidence.estimate.bounds())
        bounds, decision = (low, high), decide_difference(evidence.estimate, both.better)
    found = both.model_copy(update={"ratio" if as_ratio else "difference": change})
    if evidence is None or bounds is None:
        sides = [result.metrics[name] for result in (baseline, candidate)]
        reasons = dict.fromkeys(side.reason for side in sides if side.ci is None and side.reason)
        reason = " ".join(filter(None, reasons)) or NO_INTERVAL
        return found.model_copy(update={"decision": Decision.UNDECIDED, "reason": reason})
    single = SINGLE_REPLICATE if evidence.single_sides else None
    update = {
        "ci": bounds,
        "decision": decision,
        "chance": chance,
        "paired": evidence.paired,
        "reason": single,
    }
    return found.model_copy(update=update)


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
    if single_sides == 0:
        low, high = map(float, logarithm.bounds(0.90))
        is_within = low >= -math.log1p(MARGIN) and high <= math.log1p(MARGIN)
        return Decision.EQUIVALENT if is_within else decide_difference(logarithm, better)
    return decide_difference(with_processes(logarithm, single_sides), better)


def with_processes(logarithm: Estimate, single_sides: int) -> Estimate:
    """With the variation between processes that a side of one process does not show. It is taken as known: only the
    estimate's own part has few degrees of freedom."""
    if single_sides == 0:
        return logarithm
    own, others = logarithm.error**2, single_sides * PROCESSES_DIFFER**2
    freedom = logarithm.freedom * ((own + others) / np.maximum(own, 1e-12)) ** 2
    return replace(logarithm, error=np.sqrt(own + others), freedom=freedom)


def decide_difference(estimate: Estimate, better: Better) -> Decision:
    """Better or worse if the 95% interval leaves 0 out."""
    low, high = map(float, estimate.bounds())
    if low <= 0 <= high:
        return Decision.EQUAL if low == high else Decision.UNDECIDED
    return direction(low, better)


def direction(change: float, better: Better) -> Decision:
    return Decision.BETTER if (change > 0) == (better is Better.HIGHER) else Decision.WORSE


_KNOWN_WELL = 1000.0
"""Degrees of freedom of an interval that does not say its own."""


@dataclass(frozen=True)
class Evidence:
    """An estimate, whether it is over pairs, and how many sides are single processes, which say nothing of others.

    `ratio` is that of the turns, where the estimate comes from these and not from the two values.
    """

    estimate: Estimate
    ratio: float | None = None
    paired: bool = False
    single_sides: int = 0


def evidence_of(
    name: str, change: float, baseline: StoredResult, candidate: StoredResult, *, as_ratio: bool
) -> Evidence | None:
    """Candidate against baseline: the logarithm of their ratio, or their difference; None without an interval. `change`
    is what the two values say."""
    ours, theirs = baseline.metrics[name], candidate.metrics[name]
    parts = baseline.without_part(name), candidate.without_part(name)
    if parts[0] and len(parts[0]) == len(parts[1]):
        without = _scaled(parts[1], as_ratio) - _scaled(parts[0], as_ratio)
        return Evidence(estimate_of_parts(_scaled((change,), as_ratio)[0], without), paired=True)
    factors = candidate.factors_over(name, baseline) if as_ratio else ()
    if len(factors) > 1:
        logarithm = mean_of(np.log(factors))
        return Evidence(logarithm, ratio=float(np.exp(logarithm.centre)), paired=True)
    sides = [_scaled(summary.per_replicate, as_ratio) for summary in (ours, theirs)]
    if baseline.was_beside(candidate) and len(sides[0]) == len(sides[1]) > 1:
        return Evidence(mean_of(sides[1] - sides[0]), paired=True)
    found = [alone(summary, as_ratio) for summary in (ours, theirs)]
    if found[0] is None or found[1] is None or not comparable(ours.replicates or 1, theirs.replicates or 1):
        return None
    single = 0 if any(parts) else sum(summary.replicates < 2 for summary in (ours, theirs))
    independent = difference(found[1], found[0])
    if not factors:
        return Evidence(independent, single_sides=single)
    # Turns say what the ratio is, and a single pair of processes not how far it is from that of others.
    around = replace(independent, centre=np.log(factors[0]))
    return Evidence(around, ratio=factors[0], single_sides=single)


def alone(summary: StoredSummary, as_ratio: bool) -> Estimate | None:
    """One side by itself: from its processes, or from its interval; it reaches to where it would be undisturbed."""
    if summary.value is None or summary.cost_bound is None:
        return None
    found = _measured(summary, as_ratio)
    if found is None or summary.cost_bound == 0:
        return found
    undisturbed, measured = _scaled((summary.value * summary.disturbance, summary.value), as_ratio)
    return replace(
        found, below=float(max(0.0, measured - undisturbed)), above=float(max(0.0, undisturbed - measured))
    )


def _measured(summary: StoredSummary, as_ratio: bool) -> Estimate | None:
    if len(summary.per_replicate) > 1:
        return mean_of(_scaled(summary.per_replicate, as_ratio))
    bounds = summary.measured_ci
    if bounds is None or summary.value is None or (as_ratio and bounds[0] <= 0):
        return None
    low, high = _scaled(bounds, as_ratio)
    freedom = summary.freedom or _KNOWN_WELL
    error = (high - low) / 2 / t_quantile(0.975, freedom)
    centre = _scaled((summary.value,), as_ratio)[0]
    return Estimate(np.asarray(centre), np.asarray(error), np.asarray(freedom))


def _scaled(figures: tuple[float, ...], as_ratio: bool) -> Array:
    return np.log(figures) if as_ratio else np.asarray(figures, dtype=np.float64)


def speedup(baseline: StoredSummary, candidate: StoredSummary) -> tuple[float, Bounds | None] | None:
    """The ratio, above 1 where the candidate is better, with its 95% interval; None where a figure is not positive."""
    above, below = (candidate, baseline) if candidate.better is Better.HIGHER else (baseline, candidate)
    if min((*above.figures, *below.figures), default=0.0) <= 0 or above.value is None or below.value is None:
        return None
    ratio = above.value / below.value
    sides = [alone(each, as_ratio=True) for each in (above, below)]
    if sides[0] is None or sides[1] is None or not comparable(above.replicates or 1, below.replicates or 1):
        return ratio, None
    return ratio, factor_bounds(ratio, difference(sides[0], sides[1]))
