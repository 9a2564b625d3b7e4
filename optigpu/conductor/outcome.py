"""Makes a variant's outcome from its replicates: measurements, summaries, verdict, result with its provenance."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from optigpu import __version__
from optigpu.child.messages import Metered
from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.session import Session
from optigpu.conductor.verdicts.cost import Evidence, widened
from optigpu.conductor.verdicts.disturbance import Goal, Yardstick
from optigpu.conductor.verdicts.judge import judge
from optigpu.conductor.verdicts.outside import bounds_of_readings
from optigpu.documents.facts import (
    NO_MODEL,
    NOT_RECORDED,
    BuildFacts,
    ImageQuality,
    KernelFacts,
    LossQuality,
    RunFacts,
    TextQuality,
    WarmUpFacts,
    WeightFacts,
)
from optigpu.documents.result import (
    Environment,
    Measurement,
    MetricSummary,
    Outcome,
    Provenance,
    Result,
    Samples,
)
from optigpu.documents.rounds import QUERY_METRICS, LoadRun
from optigpu.engines.install import LIBRARIES, Machine, build_facts
from optigpu.hardware.catalog import find_class
from optigpu.job.measured import measured, summary_of
from optigpu.job.spec import JobSpec, Variant, digest
from optigpu.models.described import facts_of
from optigpu.models.reference import parse_reference
from optigpu.quality.figures import with_windows
from optigpu.statistics.intervals import describe, summarise
from optigpu.statistics.within import Timed, ratio_of_turns
from optigpu.vocabulary import VariantStatus, new_id, utc_now

NOT_COMPILED = "Nothing was compiled."


def outcome_of(
    session: Session,
    variant: Variant,
    evidence: Sequence[Evidence],
    together: Mapping[int, Sequence[Evidence]],
    preparation: Preparation,
) -> Outcome:
    """The outcome of a variant whose replicates were all measured, side by side with those of `together`."""
    spec, replicates = session.spec, [each.replicate for each in evidence]
    of_load = load_measurements(evidence)
    measurements = [*_measurements(variant, replicates), *of_load]
    builds = builds_of(variant, session.environment, replicates[0].ready.facts)
    facts = with_load(_facts(replicates, sorted(together)), evidence).model_copy(update={"builds": builds})
    others = {index: theirs for index, theirs in together.items() if index != variant.index}
    metrics = with_turns(_metrics(evidence, measurements), evidence, others)
    verdict = judge(spec, variant, evidence, metrics, builds)
    of_requests = (*replicates[0].samples, *(each.name for each in of_load))
    bounds = dict.fromkeys(of_requests, verdict.cost_bound) | bounds_of_readings(evidence)
    metrics = with_windows(widened(metrics, bounds), facts.quality)
    published = find_class(session.environment.hardware_class)
    roofline = preparation.roofline(variant.workload, metrics, facts, published)
    environment = session.environment_of(variant)
    provenance = provenance_of(spec, variant, environment, facts)
    result = Result(
        id=new_id(),
        created_at=utc_now(),
        variant=summary_of(measured(variant, provenance)),
        verdict=verdict,
        metrics=metrics | roofline.metrics,
        bound=roofline.bound,
        facts=facts.model_copy(update={"roofline": roofline.facts}),
        rounds=tuple(each.selection.records for each in evidence),
        environment=environment,
        seed=spec.seed,
        provenance=provenance,
    )
    samples = {measurement.name: measurement.samples for measurement in measurements if measurement.samples}
    samples |= raw_queries(evidence)
    # The files that the meters left; of one name those of the first replicate.
    readings = _readings(replicates)
    files = [(name, Path(path)) for each in readings for name, path in each.artifacts.items()]
    return Outcome(
        index=variant.index,
        status=VariantStatus.SUCCEEDED,
        result=result,
        samples=samples,
        artifacts=dict(reversed(files)),
    )


def evidence_of(session: Session, replicates: Sequence[Replicate]) -> list[Evidence]:
    yardstick = Yardstick(session.spec.device, session.monitor.fastest_probe_s)
    goals = [Goal.of(session.spec.measure, replicate.ready.request_s) for replicate in replicates]
    return [
        Evidence(number, replicate, replicate.selection(yardstick, goal))
        for number, (replicate, goal) in enumerate(zip(replicates, goals, strict=True), 1)
    ]


def _metrics(evidence: Sequence[Evidence], measurements: Sequence[Measurement]) -> dict[str, MetricSummary]:
    of_requests = evidence[0].replicate.samples
    counted = {
        name: tuple(each.selection.of(each.replicate.samples[name]) for each in evidence)
        for name in of_requests
    }
    found = [
        each.model_copy(update={"samples": counted[each.name]}) if each.name in counted else each
        for each in measurements
    ]
    return {each.name: summarise(each) for each in found}


def _measurements(variant: Variant, replicates: Sequence[Replicate]) -> list[Measurement]:
    names, for_some = replicates[0].samples, variant.workload.for_some
    requests = [
        Measurement(name=name, samples=tuple(replicate.samples[name] for replicate in replicates))
        for name in names
    ]
    requests += [
        Measurement(name=name, reason=reason) for name, reason in for_some.items() if name not in names
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
    by_meter: dict[str, list[Metered]] = {}
    for metered in _readings(replicates):
        by_meter.setdefault(metered.meter, []).append(metered)
    found = []
    for readings in by_meter.values():
        reasons = dict(item for metered in readings for item in metered.reasons.items())
        names = dict.fromkeys((*(name for metered in readings for name in metered.values), *reasons))
        for name in names:
            values = [metered.values.get(name) for metered in readings]
            found.append(_once(name, values, reasons.get(name)))
    return found


def _once(name: str, values: Sequence[float | None], reason: str | None) -> Measurement:
    """The metrics with one number for each process. A variant has such a metric only if every replicate has it."""
    if None in values:
        return Measurement(name=name, reason=reason or "Not every replicate measured it.")
    samples: Samples = tuple((value,) for value in values if value is not None)
    return Measurement(name=name, samples=samples)


def _readings(replicates: Sequence[Replicate]) -> Iterable[Metered]:
    return (metered for replicate in replicates for metered in replicate.metered)


def _facts(replicates: Sequence[Replicate], together: Sequence[int]) -> RunFacts:
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
            "kernel": _kernel([each.kernel for each in replicates if each.kernel]),
            "described": {name: describe(values) for name, values in described.items()},
        }
    )


def _kernel(found: Sequence[KernelFacts]) -> KernelFacts | None:
    """Of all replicates together."""
    if not found:
        return None
    outside_s = [each.outside_s for each in found if each.outside_s is not None]
    reading_s = [each.reading_s for each in found if each.reading_s is not None]
    return found[0].model_copy(
        update={
            "answers": sum(each.answers for each in found),
            "error": max(each.error for each in found),
            "outside_s": median(outside_s) if outside_s else None,
            "reading_s": median(reading_s) if reading_s else None,
        }
    )


def with_turns(
    metrics: Mapping[str, MetricSummary],
    evidence: Sequence[Evidence],
    others: Mapping[int, Sequence[Evidence]],
) -> dict[str, MetricSummary]:
    """The summaries, those of requests with their ratios to what each of the others measured beside it, where every
    pair of processes has one."""
    found = dict(metrics)
    for name in evidence[0].replicate.samples:
        if name in found:
            ratios = {index: _ratios(name, evidence, theirs) for index, theirs in others.items()}
            beside = {index: each for index, each in ratios.items() if each}
            found[name] = found[name].model_copy(update={"beside": beside})
    return found


def _ratios(name: str, evidence: Sequence[Evidence], theirs: Sequence[Evidence]) -> tuple[float, ...]:
    """One for each pair of processes; empty where not every pair has one, or the others measure something else."""
    if any(name not in each.replicate.samples for each in theirs):
        return ()
    sides = (
        [Timed(each.selection.records, each.replicate.samples[name]) for each in side]
        for side in (evidence, theirs)
    )
    ratios = [ratio_of_turns(*pair) for pair in zip(*sides, strict=False)]
    found = tuple(ratio for ratio in ratios if ratio is not None)
    return found if len(found) == len(ratios) else ()


MOMENTS = ("sent_s", "prompt_tokens", "output_tokens")
"""Stored beside the samples of the metrics, so that a result can be computed again from each query."""


def load_measurements(evidence: Sequence[Evidence]) -> list[Measurement]:
    """The metrics of queries, and those of runs that may be zero, from the rounds that are counted."""
    runs = [each.selection.of(each.replicate.loads) for each in evidence]
    if not any(runs):
        return []
    samples = {name: _of_queries(name, runs) for name in QUERY_METRICS}
    for name, field in (("goodput_per_s", "goodput_per_s"), ("queue_length", "waiting")):
        samples[name] = tuple(tuple(float(getattr(run, field)) for run in process) for process in runs)
    return [Measurement(name=name, samples=each) for name, each in samples.items()]


def raw_queries(evidence: Sequence[Evidence]) -> dict[str, Samples]:
    """Each query's moment and lengths, in the order of the samples of its metrics."""
    runs = [each.selection.of(each.replicate.loads) for each in evidence]
    return {name: _of_queries(name, runs) for name in MOMENTS} if any(runs) else {}


def with_load(facts: RunFacts, evidence: Sequence[Evidence]) -> RunFacts:
    """The facts with what the measured runs say; unchanged where there is no load."""
    runs = [run for each in evidence for run in each.replicate.loads]
    if facts.load is None or not runs:
        return facts
    saturated = [run.saturated for run in runs if run.saturated is not None]
    load = facts.load.model_copy(
        update={
            "runs": len(runs),
            "saturated_runs": sum(saturated) if saturated else None,
            "law": max(
                (run.law for run in runs), key=lambda law: abs(law.counted - law.expected) - law.tolerance
            ),
            "queue": runs[-1].queue,
        }
    )
    return facts.model_copy(update={"load": load})


def _of_queries(name: str, runs: Sequence[Sequence[LoadRun]]) -> Samples:
    return tuple(tuple(float(value) for run in process for value in getattr(run, name)) for process in runs)


def builds_of(variant: Variant, environment: Environment, facts: RunFacts) -> tuple[BuildFacts, ...]:
    """The engine's own library, then those of packages that its techniques compute with."""
    model = facts_of(parse_reference(variant.model)) if variant.model else None
    packages = [package for technique in variant.stack for package in technique.packages(model)]
    names = dict.fromkeys((variant.backend, *(package for package in packages if package in LIBRARIES)))
    gpu = next(iter(environment.gpus(variant.device)), None)
    machine = Machine(environment.cpu_features, gpu)
    told = facts.recorded.get(f"{variant.backend}_flags")
    found = (build_facts(name, machine, told if isinstance(told, str) else None) for name in names)
    return tuple(each for each in found if each)


NO_QUALITY = "Quality was not measured."
NO_DATASET: Mapping[type, str] = {
    ImageQuality: "Quality was measured on images that were made from the seed; facts.quality.of says how.",
    LossQuality: "The losses of training are those of samples that were made from the seed.",
    TextQuality: "Quality was measured on a text that the fp32 model wrote itself; facts.quality.tokens_sha256 is its "
    "hash.",
}
NO_CHECKOUT = (
    "The commit is not known: the code runs outside a git checkout, and OPTIGPU_REVISION is not set."
)


def provenance_of(spec: JobSpec, variant: Variant, environment: Environment, facts: RunFacts) -> Provenance:
    """The provenance of a measured variant, from what was recorded of it. What was not is null, with the reason."""
    why = NOT_RECORDED if variant.model else NO_MODEL
    weights = facts.weights or WeightFacts(reasons={"hash": why, "revision": why})
    dataset = facts.pictures.sha256 if facts.pictures else None
    if isinstance(facts.quality, TextQuality | ImageQuality):
        dataset = dataset or facts.quality.dataset_sha256
    found = {
        "model_revision": (weights.revision, weights.reasons.get("revision", NOT_RECORDED)),
        "weight_hash": (weights.hash, weights.reasons.get("hash", NOT_RECORDED)),
        "dataset_hash": (dataset, NO_DATASET.get(type(facts.quality), NO_QUALITY)),
        "git_revision": (environment.git_revision, NO_CHECKOUT),
    }
    return Provenance(
        **{name: value for name, (value, _) in found.items()},
        spec_digest=digest(spec.model_dump(mode="json")),
        seed=spec.seed,
        weight_hash_of=weights.hash_of,
        optigpu_version=__version__,
        git_dirty=environment.git_dirty,
        reasons={name: why for name, (value, why) in found.items() if value is None},
    )
