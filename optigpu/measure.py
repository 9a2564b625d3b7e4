"""run(spec, on_event) -> Report: a job from its request to its results. Loads no torch.

Variants are measured side by side as far as the memory allows; each replicate of a variant is a separate process.
An error ends only its own variant.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optigpu.conductor.preparation import needs, prepare
from optigpu.conductor.preparation import took as prepared
from optigpu.conductor.processes.groups import Group, measure_again
from optigpu.conductor.processes.room import MakeMemoryRule, MemoryBudget
from optigpu.conductor.progress import WAITING_FOR_DEVICE
from optigpu.conductor.quiet import LOOKING
from optigpu.conductor.search import scale_batches, search
from optigpu.conductor.session import Session, environment_for, open_session
from optigpu.documents.events import Event, Finished, Planned, PlannedVariant, Span, VariantFinished
from optigpu.documents.result import (
    Attribution,
    Environment,
    Outcome,
    Result,
    Rough,
    Samples,
    VerdictWarning,
)
from optigpu.hardware import probe
from optigpu.hardware.device_kinds import KINDS, devices_of, no_device
from optigpu.job.attribution import attribute
from optigpu.job.estimate import (
    AUDIT,
    MAKE,
    NO_RATES,
    Need,
    Took,
    guess_of,
    keep_rates,
    known_rates,
    made_again,
    within_deadline,
)
from optigpu.job.plan import variants_of
from optigpu.job.search import foreseen
from optigpu.job.spec import JobSpec, PlanName, Variant
from optigpu.vocabulary import (
    CancelledError,
    DeviceKind,
    Frozen,
    Role,
    StoppedError,
    UnsupportedError,
    VariantStatus,
    utc_now,
)

REPLICATE = (sys.executable, "-P", "-m", "optigpu.child.replicate")
"""The program that measures. -P keeps files of the working directory from being taken for modules."""

NONE_DONE: Mapping[int, Outcome] = MappingProxyType({})


class Report(Frozen):
    """The results of a run, how each variant ended, and the gain of each technique.

    It covers the whole job, with the outcomes of earlier attempts that were passed to the run. `stopped` says why the
    job ended before everything was measured; None if it did not. `cancelled` is whether somebody asked for that.
    `timeline` is where this run's time went.
    """

    spec: JobSpec
    results: tuple[Result, ...]
    outcomes: tuple[Outcome, ...]
    attribution: Attribution
    stopped: str | None = None
    cancelled: bool = False
    timeline: tuple[Span, ...] = ()

    def document(self) -> dict[str, Any]:
        """The report as plain JSON, without raw samples."""
        return self.model_dump(mode="json", include={"spec", "results", "attribution"})


def never() -> str | None:
    """The default of `cancelled`: no reason to stop."""
    return None


def run(
    spec: JobSpec | Mapping[str, Any],
    on_event: Callable[[Event], None],
    *,
    cancelled: Callable[[], str | None] = never,
    done: Mapping[int, Outcome] = NONE_DONE,
    lock_dir: Path | None = None,
    threads: int | None = None,
    program: Sequence[str] = REPLICATE,
    memory_rule: MakeMemoryRule = MemoryBudget,
) -> Report:
    """Measures the variants of a job, a JobSpec or its JSON, while no other job is measured on the device.

    `done` are the outcomes of variants, by their index, that an earlier attempt has measured; these are not measured
    again. `on_event` is called with each event as it happens. `cancelled` is asked at least once a second for a reason
    to stop. `threads` is how many the model computes with; None takes every core. `program` is what measures, and
    `memory_rule` decides how many processes of it are resident at once. The job's time limit counts from when it has
    the device; the wait for other processes to rest is part of it, and it ends at the job's deadline at the latest.
    When the job is cancelled or its time is up, whole replicates become results, and a variant without one ends with a
    reason.

    Raises SpecError for a request that is wrong, a deadline that has passed, or a plan with too many variants or too
    little time, UnsupportedError where this machine has no such device, OptiGPUError if the device cannot be locked,
    and what `on_event` and `cancelled` raise. No process is left behind in any case.
    """
    spec = within_deadline(spec if isinstance(spec, JobSpec) else JobSpec.model_validate(spec), utc_now())
    variants = variants_of(spec)
    if spec.device is not DeviceKind.CPU:
        require_device(spec, probe())
    on_event(
        Planned(variants=tuple(PlannedVariant(index=v.index, role=v.role, label=v.label) for v in variants))
    )
    todo = [variant for variant in variants if variant.index not in done]
    outcomes: dict[int, Outcome] = dict(done)
    rates = known_rates() if tuple(program) == REPLICATE else NO_RATES
    needed = needs(spec, todo, environment_for(spec.device), threads)
    plan, estimate = foreseen(spec, todo, rates, needed)
    if todo:
        on_event(estimate)
    opening = open_session(
        spec,
        [variant.index for variant in todo],
        on_event,
        program=program,
        cancelled=cancelled,
        lock_dir=lock_dir,
        threads=threads,
        memory_rule=memory_rule,
        plan=plan,
    )
    stop, again, spans, took, slowed = _measured(opening, todo, outcomes, on_event)
    if tuple(program) == REPLICATE:  # another program takes another time
        parts, preparing = _lasted(spec, todo, needed, spans, took)
        keep_rates(rates.with_run(parts, preparing, slowed))
    attribution = attribute(spec, variants, outcomes, again)
    on_event(Finished(attribution=attribution))
    found = tuple(outcomes[index] for index in sorted(outcomes))
    return Report(
        spec=spec,
        results=tuple(outcome.result for outcome in found if outcome.result),
        outcomes=found,
        attribution=attribution,
        stopped=f"{stop} {_kept(found)}" if stop else None,
        cancelled=isinstance(stop, CancelledError),
        timeline=spans,
    )


def _measured(
    opening: AbstractContextManager[Session],
    todo: Sequence[Variant],
    outcomes: dict[int, Outcome],
    on_event: Callable[[Event], None],
) -> tuple[StoppedError | None, Samples, tuple[Span, ...], Mapping[tuple[int, str], float], float]:
    """Measures variants in one session and adds an outcome for each. Returns why the session had to stop, if it had,
    what the baseline measured again, where the time went, what each part of a variant took, and by what factor
    others at work were expected to slow that down."""
    again: Samples = ()
    spans: tuple[Span, ...] = ()
    took: Mapping[tuple[int, str], float] = {}
    rough: Mapping[int, Rough] = {}
    slowed = 1.0
    try:
        with opening as session:
            session.progress.limit(session.spec.limits.timeout_s)
            try:
                if todo:
                    again = _MEASURES.get(session.spec.plan, _measure)(session, todo, outcomes)
            finally:
                spans, took = session.progress.spans(), session.progress.took
                rough, slowed = session.rough.found, session.slowed
    except StoppedError as stop:
        status = VariantStatus.CANCELLED if isinstance(stop, CancelledError) else VariantStatus.FAILED
        reason = f"{stop} No replicate of this variant was whole by then."
        for index in (variant.index for variant in todo if variant.index not in outcomes):
            outcomes[index] = Outcome(index=index, status=status, reason=reason, rough=rough.get(index))
            on_event(VariantFinished(outcome=outcomes[index]))
        return stop, again, spans, took, slowed
    return None, again, spans, took, slowed


WAITS = (WAITING_FOR_DEVICE, LOOKING)


def _lasted(
    spec: JobSpec,
    variants: Sequence[Variant],
    needed: Sequence[Need],
    spans: Sequence[Span],
    took: Mapping[tuple[int, str], float],
) -> tuple[dict[tuple[Variant, str], Took], Mapping[Need, float]]:
    """How long the parts of a run's variants and its preparation lasted."""
    by_index = {variant.index: variant for variant in variants}
    guesses = {variant.index: guess_of(spec, variant).seconds for variant in variants}
    parts = {
        (by_index[index], part): Took(
            seconds, guesses[index].get(part, 0.0), made_again(by_index[index]) if part == MAKE else 1.0
        )
        for (index, part), seconds in took.items()
    }
    job_s = {span.doing: span.seconds for span in spans if span.index is None and span.doing not in WAITS}
    is_prepared = any(part == AUDIT for _, part in took)
    return parts, prepared(needed, job_s) if is_prepared else {}


def _measure(session: Session, todo: Sequence[Variant], outcomes: dict[int, Outcome]) -> Samples:
    """Adds each outcome as soon as it is known. Raises StoppedError when the job must stop. Returns what the baseline
    measured again at the end if the variants were not all side by side."""
    preparation = prepare(session, todo)
    # of several models or workloads the first one's, which attribution compares with itself
    baseline = next(
        (variant for variant in todo if variant.role is Role.BASELINE and not variant.index), None
    )
    again: Variant | None = None
    side_by_side = True
    left = tuple(todo)
    while left:
        group = Group(session, left)
        try:
            group.measure(preparation)
        finally:
            outcomes |= group.outcomes
        left = group.waiting
        side_by_side = side_by_side and group.fit_together and not left
        if baseline and not side_by_side and outcomes[baseline.index].result:
            again = baseline
            session.progress.expect((again.index, session.spec.measure.replicates))
    return measure_again(session, again) if again else ()


_MEASURES: Mapping[PlanName, Callable[[Session, Sequence[Variant], dict[int, Outcome]], Samples]] = {
    PlanName.SEARCH: search,
    PlanName.BATCH_SCALING: scale_batches,
}
"""How the variants of a plan are measured, where not as most are."""


def _kept(outcomes: Sequence[Outcome]) -> str:
    """How much of the job was measured before it stopped."""
    results = [outcome.result for outcome in outcomes if outcome.result]
    fewer = sum(VerdictWarning.INCOMPLETE in result.verdict.warnings for result in results)
    return (
        f"Variants with all replicates: {len(results) - fewer}, with fewer: {fewer}, "
        f"with no result: {len(outcomes) - len(results)}."
    )


OTHERWISE = ", or submit the job to a service with such a worker"


def require_device(spec: JobSpec, environment: Environment) -> None:
    """Raises UnsupportedError if a job for a GPU cannot run on this machine, and says why."""
    problem = next(_problems(spec, environment), None)
    if problem:
        raise UnsupportedError(problem)


def _problems(spec: JobSpec, environment: Environment) -> Iterator[str]:
    """What stands against a job for a GPU, the most fundamental first. It would run on the first of its kind."""
    gpus = environment.gpus(spec.device)
    if not gpus:
        why = no_device(spec.device, environment)
        yield f"device: {why[0].lower()}{why[1:]}; set device to {devices_of(environment)}{OTHERWISE}."
        return
    gpu, target, built = gpus[0], spec.target, KINDS[spec.device].built
    if (target.gpu or "").lower() not in gpu.name.lower():
        yield f"target.gpu: this machine's GPU is {gpu.name}, not {target.gpu}; leave it out, or submit the job."
    if gpu.memory_bytes < target.min_vram_bytes:
        yield (
            f"target.min_vram_bytes: this machine's GPU has {gpu.memory_bytes} bytes, fewer than "
            f"{target.min_vram_bytes}; ask for less, or submit the job."
        )
    torch = environment.software.get("torch")
    backends = {spec.backend, *(each.backend for each in spec.beside)}
    if torch and built and built not in environment.software and "torch" in backends:
        yield (
            f"device: torch {torch} here was not built for {spec.device.upper()}; install one that was, or set device "
            f"to cpu{OTHERWISE}."
        )
