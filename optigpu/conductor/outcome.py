"""Makes a variant's outcome from its replicates: measurements, summaries, verdict, result."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from optigpu.child.messages import Metered
from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.provenance import measured, provenance_of
from optigpu.conductor.session import Session
from optigpu.conductor.verdicts.judge import judge
from optigpu.documents.facts import RunFacts, WarmUpFacts
from optigpu.documents.result import Measurement, Outcome, Result, Samples, VariantSummary
from optigpu.hardware.catalog import find_class
from optigpu.job.spec import Variant
from optigpu.roofline import roofline_of
from optigpu.statistics.intervals import describe, summarise
from optigpu.vocabulary import VariantStatus, new_id, utc_now

T = TypeVar("T")

NOT_COMPILED = "Nothing was compiled."


def outcome_of(
    session: Session,
    variant: Variant,
    replicates: Sequence[Replicate],
    together: Sequence[int],
    preparation: Preparation,
) -> Outcome:
    """The outcome of a variant whose replicates were all measured, side by side with the variants in `together`."""
    spec = session.spec
    measurements = _measurements(replicates)
    facts = _facts(replicates, together)
    metrics = {measurement.name: summarise(measurement, spec.seed) for measurement in measurements}
    published = find_class(session.environment.hardware_class)
    roofline = roofline_of(variant.workload, metrics, facts, preparation.peaks, published)
    provenance = provenance_of(spec, variant, session.environment, facts)
    result = Result(
        id=new_id(),
        created_at=utc_now(),
        variant=summary_of(measured(variant, provenance)),
        verdict=judge(spec, variant, replicates, metrics),
        metrics=metrics | roofline.metrics,
        bound=roofline.bound,
        facts=facts.model_copy(update={"roofline": roofline.facts}),
        environment=session.environment,
        seed=spec.seed,
        provenance=provenance,
    )
    samples = {measurement.name: measurement.samples for measurement in measurements if measurement.samples}
    return Outcome(
        index=variant.index,
        status=VariantStatus.SUCCEEDED,
        result=result,
        samples=samples,
        artifacts=_artifacts(replicates),
    )


def summary_of(variant: Variant) -> VariantSummary:
    """The summary of a variant that its result contains."""
    return VariantSummary(
        index=variant.index,
        role=variant.role,
        label=variant.label,
        workload=variant.workload.model_dump(mode="json"),
        model=variant.model,
        backend=variant.backend,
        device=variant.device,
        stack=tuple(technique.model_dump(mode="json") for technique in variant.stack),
        workload_digest=variant.workload_digest,
        variant_digest=variant.digest,
        primary_metric=variant.workload.primary,
    )


def _measurements(replicates: Sequence[Replicate]) -> list[Measurement]:
    names = replicates[0].samples
    requests = [
        Measurement(name=name, samples=tuple(replicate.samples[name] for replicate in replicates))
        for name in names
    ]
    loads = tuple((replicate.ready.load_s,) for replicate in replicates)
    compiles = [replicate.ready.compile_s for replicate in replicates]
    return [
        *requests,
        Measurement(name="load_s", samples=loads),
        _once("compile_s", compiles, NOT_COMPILED),
        *_metered(replicates),
    ]


def _metered(replicates: Sequence[Replicate]) -> list[Measurement]:
    """The readings of the meters: one number for each replicate in which a meter was read."""
    by_meter: dict[str, list[Metered]] = {}
    for metered in _readings(replicates):
        by_meter.setdefault(metered.meter, []).append(metered)
    return [measurement for readings in by_meter.values() for measurement in _of_meter(readings)]


def _of_meter(readings: Sequence[Metered]) -> list[Measurement]:
    reasons = _merged(*(metered.reasons for metered in readings))
    names = dict.fromkeys((*_merged(*(metered.values for metered in readings)), *reasons))
    return [
        _once(name, [metered.values.get(name) for metered in readings], reasons.get(name)) for name in names
    ]


def _once(name: str, values: Sequence[float | None], reason: str | None) -> Measurement:
    """The metrics with one number for each process. A variant has such a metric only if every replicate has it."""
    if None in values:
        return Measurement(name=name, reason=reason or "Not every replicate measured it.")
    samples: Samples = tuple((value,) for value in values if value is not None)
    return Measurement(name=name, samples=samples)


def _readings(replicates: Sequence[Replicate]) -> Iterable[Metered]:
    return (metered for replicate in replicates for metered in replicate.metered)


def _merged(*mappings: Mapping[str, T]) -> dict[str, T]:
    return {name: value for mapping in mappings for name, value in mapping.items()}


def _facts(replicates: Sequence[Replicate], together: Sequence[int]) -> RunFacts:
    """The first replicate's facts, each replicate's warm-up, and the times within requests."""
    first = replicates[0]
    described: dict[str, list[float]] = {}
    for replicate in replicates:
        for name, values in (replicate.audit.described if replicate.audit else {}).items():
            described.setdefault(name, []).extend(values)
    warmups = [WarmUpFacts(requests=r.ready.warmup_requests, steady=r.ready.steady) for r in replicates]
    return first.ready.facts.with_readings(*(metered.facts for metered in first.metered)).model_copy(
        update={
            "warmup": tuple(warmups),
            "side_by_side": tuple(together),
            "described": {name: describe(values) for name, values in described.items()},
        }
    )


def _artifacts(replicates: Sequence[Replicate]) -> dict[str, Path]:
    """The files that the meters left; of one name those of the first replicate."""
    files = [
        (name, Path(path)) for metered in _readings(replicates) for name, path in metered.artifacts.items()
    ]
    return dict(reversed(files))
