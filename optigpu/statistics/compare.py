"""Compares two stored results: each metric's ratio, its 95% interval, and whether the difference is real.

Only summaries are read, never samples, so that a service can compare on every request. Where both results have
several processes, the processes' medians are resampled on a logarithmic scale and widened as
`optigpu.statistics.intervals` does it.
Else the ratio's interval comes from those of the two values, on the same scale (Donner and Zou, Closed-form confidence
intervals for functions of the normal mean and standard deviation, 2012), and decides nothing where a side is a single
process.

The decision reads the interval as two one-sided tests do (Schuirmann, 1987), only more strictly, by the 95% interval
instead of the 90% one: wholly within the margin is equivalent; else one that leaves 1 out is a difference; else nothing
is decided.
"""

import math
from collections.abc import Iterator, Mapping

from pydantic import ConfigDict, ValidationError

from optigpu.documents.older import current
from optigpu.documents.result import Samples
from optigpu.documents.views import ComparedResult, Comparison, Decision, Difference, MetricComparison
from optigpu.statistics.intervals import ratio
from optigpu.vocabulary import Better, Document, Frozen, OptiGPUError, canonical_json

MARGIN = 0.02
"""Ratios between 1 / 1.02 and 1.02 count as equivalent."""

ON_A_TEXT = (
    "kld_mean", "kld_p99", "top1_agreement", "perplexity", "perplexity_delta", "accuracy", "accuracy_loss_percent",
)  # fmt: skip
"""Metrics that depend on the text that they were measured on."""

OTHER_TEXT = "Quality was measured on different texts."
NOT_POSITIVE = "A ratio needs positive values on both sides."
NO_INTERVAL = "The ratio has no interval: a value was measured only once, or its own interval includes zero."
SINGLE_REPLICATE = (
    "single_replicate: a value comes from one process, which does not show how much processes differ."
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
        metrics={
            name: _compared(ours.metrics[name], theirs.metrics[name], _hindrance(name, ours, theirs))
            for name in names
        },
        notes=(*obstacles, *_doubts(ours, "baseline"), *_doubts(theirs, "candidate")),
        differences=tuple(_differences(baseline, candidate)),
    )


class _Read(Frozen):
    """The parts of a stored document that are read; others are ignored."""

    model_config = ConfigDict(extra="ignore")


class _Summary(_Read):
    unit: str
    better: Better
    value: float | None
    ci: tuple[float, float] | None = None
    replicates: int = 0
    per_replicate: tuple[float, ...] = ()
    reason: str | None = None


class _Variant(_Read):
    label: str
    workload: dict[str, object]
    model: str | None
    workload_digest: str
    primary_metric: str


class _Verdict(_Read):
    valid: bool
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class _Environment(_Read):
    hardware_class: str


class _Provenance(_Read):
    weight_hash: str | None = None


class _Quality(_Read):
    tokens_sha256: str | None = None


class _Facts(_Read):
    quality: _Quality | None = None


class _Result(_Read):
    id: str
    source: str = "worker"
    variant: _Variant
    verdict: _Verdict
    metrics: dict[str, _Summary]
    environment: _Environment
    provenance: _Provenance | None = None
    facts: _Facts = _Facts()

    @property
    def text(self) -> str | None:
        """The hash of the tokens on which quality was measured."""
        return self.facts.quality.tokens_sha256 if self.facts.quality else None

    @property
    def weights(self) -> str:
        """The hash of the weights, if it was recorded."""
        return (self.provenance and self.provenance.weight_hash) or "not recorded"


def _read(document: Document, side: str) -> _Result:
    try:
        return _Result.model_validate(current(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise NotComparableError(
            f"The {side} cannot be read as a result ({place}: {first['msg']})."
        ) from error


def _side(result: _Result) -> ComparedResult:
    return ComparedResult(
        id=result.id,
        label=result.variant.label,
        model=result.variant.model,
        workload=result.variant.workload,
        hardware=result.environment.hardware_class,
        valid=result.verdict.valid,
        warnings=result.verdict.warnings,
    )


def _obstacles(baseline: _Result, candidate: _Result) -> Iterator[str]:
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


def _doubts(result: _Result, side: str) -> Iterator[str]:
    if not result.verdict.valid:
        yield f"The {side} is not valid: {', '.join(result.verdict.reasons)}."


def _hindrance(name: str, baseline: _Result, candidate: _Result) -> str | None:
    """Why a metric is not comparable, if it is not."""
    return OTHER_TEXT if name in ON_A_TEXT and baseline.text != candidate.text else None


def _compared(baseline: _Summary, candidate: _Summary, hindrance: str | None) -> MetricComparison:
    both = MetricComparison(
        unit=baseline.unit, better=baseline.better, baseline=baseline.value, candidate=candidate.value
    )
    reason = _no_ratio(baseline, candidate) or hindrance
    if reason is not None or not baseline.value or not candidate.value:
        return both.model_copy(update={"reason": reason})
    quotient = candidate.value / baseline.value
    bounds = _interval(baseline, candidate, quotient)
    decision, reason = _decision(baseline, candidate, bounds)
    return both.model_copy(update={"ratio": quotient, "ci": bounds, "decision": decision, "reason": reason})


def _no_ratio(baseline: _Summary, candidate: _Summary) -> str | None:
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
    return None if min(_figures(baseline) + _figures(candidate)) > 0 else NOT_POSITIVE


def _figures(summary: _Summary) -> tuple[float, ...]:
    return (*summary.per_replicate, *(() if summary.value is None else (summary.value,)))


def _interval(baseline: _Summary, candidate: _Summary, quotient: float) -> tuple[float, float] | None:
    if len(baseline.per_replicate) > 1 and len(candidate.per_replicate) > 1:
        return ratio(_processes(candidate), _processes(baseline))[1]
    if baseline.ci is None or candidate.ci is None or min(*baseline.ci, *candidate.ci) <= 0:
        return None
    ours, theirs = _log_sides(baseline), _log_sides(candidate)
    below, above = math.hypot(theirs[0], ours[1]), math.hypot(theirs[1], ours[0])
    return quotient * math.exp(-below), quotient * math.exp(above)


def _processes(summary: _Summary) -> Samples:
    """Each process's median as if it were its only request."""
    return tuple((median,) for median in summary.per_replicate)


def _log_sides(summary: _Summary) -> tuple[float, float]:
    """The distances of the interval below and above the value, on a logarithmic scale."""
    assert summary.ci is not None
    assert summary.value is not None
    low, high = summary.ci
    return math.log(summary.value / low), math.log(high / summary.value)


def _decision(
    baseline: _Summary, candidate: _Summary, bounds: tuple[float, float] | None
) -> tuple[Decision, str | None]:
    """The decision; if it is undecided, the reason where the interval does not show it."""
    if min(baseline.replicates, candidate.replicates) < 2:
        return Decision.UNDECIDED, SINGLE_REPLICATE
    if bounds is None:
        return Decision.UNDECIDED, NO_INTERVAL
    low, high = bounds
    if low >= 1 / (1 + MARGIN) and high <= 1 + MARGIN:
        return Decision.EQUIVALENT, None
    if low <= 1 <= high:
        return Decision.UNDECIDED, None
    rises = low > 1
    return Decision.BETTER if rises == (baseline.better is Better.HIGHER) else Decision.WORSE, None


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
