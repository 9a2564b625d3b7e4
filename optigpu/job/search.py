"""The plan `search`: successive halving over the stacks that a menu of techniques allows. Every stack is measured for a
little time; the better third goes on with three times as much, and so on, until what is left is measured as the job
asks (Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, 2016,
arXiv:1502.07943). A stack whose interval lies below the best one's, and that is better in nothing else, stops at once.
A pure part of the run: it decides, and measures nothing."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import ceil

from optigpu.documents.events import Estimated
from optigpu.documents.result import OF_THE_OUTPUT, Outcome, Result
from optigpu.job.estimate import (
    IMPORT_S,
    MAKE,
    NO_RATES,
    START,
    FirstGuess,
    Guess,
    Need,
    Plan,
    Rates,
    plan_time,
    spoken,
)
from optigpu.job.spec import JobSpec, PlanName, Variant, digest, resolve
from optigpu.statistics.estimates import Between, compared, surpasses, unsurpassed
from optigpu.techniques.base import Technique
from optigpu.vocabulary import METRICS, Better, SpecError

SHRINK = 3
"""How many times fewer stacks each round has, and how many times longer each of them is measured."""
FEWEST_SECONDS = 0.3
"""The least that a round measures a process for: one round of turns is 0.4 s, or one request."""
UNKNOWN_INTERVAL = 0.05
"""The half width, as a share of the figure, of what has no interval: processes of one variant differ by less."""
OBJECTIVES = ("weight_bytes", "peak_bytes", "kld_mean", "j_per_token")
"""What a stack may be better in beside the primary metric of its workload."""


def stacks_of(menu: Sequence[Technique], workload: str) -> Iterator[tuple[Technique, ...]]:
    """Every stack of techniques of a menu, resolved, small ones first; those with a conflict are left out. A menu may
    name a technique twice, with other parameters; no stack has both."""
    seen: set[tuple[Technique, ...]] = set()
    for size in range(len(menu) + 1):
        for chosen in combinations(menu, size):
            try:
                stack = resolve(chosen, workload)
            except SpecError:
                continue
            if stack not in seen:
                seen.add(stack)
                yield stack


def rounds_of(candidates: int) -> int:
    """How many rounds so many variants take until one is left: each but the last leaves a third."""
    count = 1
    while candidates > 1:
        candidates, count = ceil(candidates / SHRINK), count + 1
    return count


def estimated(
    spec: JobSpec, variants: Sequence[Variant], rates: Rates, needs: Sequence[Need] = ()
) -> Estimated:
    """How long all rounds will take: an estimate as rough as that of any job. In the rounds after the first one of each
    variant's processes is there."""
    count, left, seconds = rounds_of(len(variants)), list(variants), 0.0
    for number in range(count):
        plan = plan_time(round_spec(spec, number, count), left, rates, () if number else needs)
        there = [plan.guesses[variant.index].seconds for variant in left if number]
        seconds += plan.seconds
        seconds -= sum(IMPORT_S + parts.get(START, 0) + parts.get(MAKE, 0) for parts in there)
        left = left[: ceil(len(left) / SHRINK)]
    limit = spec.limits.timeout_s
    stacks = f"{len(variants)} of {len(variants) + left_out(spec)} stacks"
    return Estimated(
        seconds=seconds,
        limit_s=limit,
        replicates=spec.measure.replicates,
        sentence=f"{stacks} in {count} rounds, about {spoken(seconds)} (an estimate); the limit is {spoken(limit)}.",
    )


def round_spec(spec: JobSpec, number: int, count: int) -> JobSpec:
    """The job as round `number` of `count` measures it. Only the last one has all replicates and meters: energy has
    long windows, and a profile decides nothing."""
    if number == count - 1:
        return spec
    share = SHRINK ** (count - 1 - number)
    measure = spec.measure
    kept = {"latency", "memory", "quality", *spec.workload.meters}
    most = max(FEWEST_SECONDS, measure.max_seconds / share)
    shorter = {
        "replicates": 1,
        "min_seconds": min(most, max(FEWEST_SECONDS, measure.min_seconds / share)),
        "max_seconds": most,
        "meters": tuple(meter for meter in measure.meters if meter in kept),
    }
    return spec.model_copy(update={"measure": measure.model_copy(update=shorter)})


def survivors(spec: JobSpec, outcomes: Sequence[Outcome]) -> tuple[int, ...]:
    """The indices of the variants that go on after a round, the fastest first. At most a third of them, rounded up: of
    those that the limits allow first the ones that no other surpasses in everything, then the fastest. What is surely
    slower than the fastest and better in nothing stops in any case."""
    primary = spec.workload.primary
    known = (outcome.result for outcome in outcomes if outcome.result)
    allowed = [result for result in known if is_allowed(spec, result)]
    if not allowed:
        return ()
    front = pareto(allowed, primary)
    best = [_objectives(result, primary) for result in front]
    rest = []
    for result in allowed:
        point = _objectives(result, primary)
        beaten = any(compared(each[0], point[0]) > 0 and surpasses(each, point) for each in best)
        if result not in front and not beaten:
            rest.append(result)
    ordered = sorted(front, key=lambda result: _speed(result, primary), reverse=True)
    ordered += sorted(rest, key=lambda result: _speed(result, primary), reverse=True)
    return tuple(result.variant.index for result in ordered[: ceil(len(outcomes) / SHRINK)])


def is_allowed(spec: JobSpec, result: Result) -> bool:
    """Whether a result's output is right and keeps the job's limits of quality and bytes. A disturbance, which the
    stacks of a round share, decides nothing here; the verdict stays with the result."""
    most, divergence = spec.limits.max_bytes, _value(result, "kld_mean")
    if OF_THE_OUTPUT.intersection(result.verdict.reasons) or _value(result, spec.workload.primary) is None:
        return False
    if spec.limits.max_kld is not None and (divergence is None or divergence > spec.limits.max_kld):
        return False
    return most is None or (bytes_of(result) or 0) <= most


def bytes_of(result: Result) -> float | None:
    """What counts against `limits.max_bytes`: the accelerator's peak, and on a CPU the weights."""
    peak = _value(result, "peak_bytes")
    return _value(result, "weight_bytes") if peak is None else peak


def pareto(results: Sequence[Result], primary: str) -> list[Result]:
    """The results that no other surpasses: one that is as good in every objective and better in one. Speeds whose
    intervals overlap count as equal, and so does what only one of them knows."""
    points = [_objectives(result, primary) for result in results]
    return [results[number] for number in unsurpassed(points)]


def _objectives(result: Result, primary: str) -> tuple[Between, ...]:
    return tuple(_bounds(result, name) for name in (primary, *OBJECTIVES))


def _bounds(result: Result, name: str) -> Between:
    """More is better. A figure without an interval gets the share that processes differ by, and a count nothing."""
    summary = result.metrics.get(name)
    if summary is None or summary.value is None:
        return None
    share = 0.0 if summary.unit == "B" else UNKNOWN_INTERVAL
    low, high = summary.ci or (summary.value * (1 - share), summary.value * (1 + share))
    return (low, high) if METRICS[name].better is Better.HIGHER else (-high, -low)


def _speed(result: Result, primary: str) -> float:
    value = _value(result, primary) or 0.0
    return value if METRICS[primary].better is Better.HIGHER else -value


def _value(result: Result, name: str) -> float | None:
    summary = result.metrics.get(name)
    return summary.value if summary else None


def left_out(spec: JobSpec) -> int:
    """How many stacks of the menu the limit of variants leaves out."""
    stacks = sum(1 for _ in stacks_of(spec.stack, spec.workload.kind))
    return max(0, stacks + len(spec.beside) - spec.limits.max_variants)


def too_large(spec: JobSpec, variant: Variant, weight_bytes: int | None) -> str | None:
    """Why a variant is not measured, where its predicted weights alone are over the limit; None else."""
    most = spec.limits.max_bytes
    if most is None or weight_bytes is None or weight_bytes <= most:
        return None
    return (
        f"{variant.label} was not measured: its weights take {weight_bytes / 1e9:.3g} GB, predicted, and "
        f"limits.max_bytes is {most / 1e9:.3g} GB."
    )


def limited(spec: JobSpec, seconds: float) -> JobSpec:
    return spec.model_copy(update={"limits": spec.limits.model_copy(update={"timeout_s": seconds})})


def with_round(outcome: Outcome, spec: JobSpec, number: int, count: int) -> Outcome:
    """The outcome as one of the job `spec`, with the round that it comes from in its facts. Ratios to variants of other
    rounds have no pairs."""
    result = outcome.result
    if result is None:
        return outcome
    notes = result.facts.recorded | {"search_round": number + 1, "search_rounds": count}
    changes: dict[str, object] = {
        "facts": result.facts.model_copy(update={"recorded": notes, "side_by_side": ()})
    }
    if result.provenance:
        whole = {"spec_digest": digest(spec.model_dump(mode="json"))}
        changes["provenance"] = result.provenance.model_copy(update=whole)
    return outcome.model_copy(update={"result": result.model_copy(update=changes)})


def foreseen(
    spec: JobSpec, variants: Sequence[Variant], rates: Rates = NO_RATES, needs: Sequence[Need] = ()
) -> tuple[Plan, Estimated]:
    """What the session begins with, and the event that tells how long all of it takes, by what earlier runs took and
    what the job needs before. Raises SpecError if the job's limit is too short for its least."""
    if spec.plan is PlanName.SEARCH:
        first = plan_time(round_spec(spec, 0, rounds_of(len(variants))), variants, rates, needs)
        return first, estimated(spec, variants, rates, needs)
    if spec.plan is PlanName.BATCH_SCALING:
        return guessed(spec, variants)
    plan = plan_time(spec, variants, rates, needs)
    return plan, plan.estimated()


ATTEMPTS = "attempts"
"""All that a variant's process does: it loads the model, and tries batches."""
ATTEMPT_S = 2.0


def guessed(spec: JobSpec, variants: Sequence[Variant]) -> tuple[Plan, Estimated]:
    """One process for each variant, which doubles the batch until memory runs out, and bisects."""
    attempts = 2 * math.ceil(math.log2(spec.limits.max_batch)) + 1
    guesses = {
        each.index: Guess({ATTEMPTS: first.load_s + first.make_s + attempts * ATTEMPT_S})
        for each, first in ((each, FirstGuess(each)) for each in variants)
    }
    plan = Plan(spec=spec, guesses=guesses, replicates=1)
    limit_s, seconds = spec.limits.timeout_s, plan.beside_sampling_s
    about = f"{len(variants)} x {attempts} batches at most, about {spoken(seconds)} (an estimate)"
    sentence = f"{about}; the limit is {spoken(limit_s)}."
    return plan, Estimated(seconds=seconds, limit_s=limit_s, replicates=1, sentence=sentence)
