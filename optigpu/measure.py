"""run(spec, on_event) -> Report: a job from its request to its results. Loads no torch.

Variants are measured side by side as far as the memory allows; each replicate of a variant is a separate process.
An error ends only its own variant.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optigpu.conductor.preparation import prepare
from optigpu.conductor.processes.groups import Group, measure_again
from optigpu.conductor.processes.memory_budget import MakeMemoryRule, MemoryBudget
from optigpu.conductor.quiet_start import wait_for_quiet
from optigpu.conductor.requirements import require_device
from optigpu.conductor.session import Session, open_session
from optigpu.documents.events import Event, Finished, Planned, PlannedVariant, VariantFinished
from optigpu.documents.result import Attribution, Outcome, Result, Samples, VerdictWarning
from optigpu.fit.memory import predicted_weight_bytes
from optigpu.hardware import probe
from optigpu.job.attribution import attribute
from optigpu.job.estimate import Plan, plan_time
from optigpu.job.plan import variants_of
from optigpu.job.search import (
    RoundEvents,
    estimated,
    limited,
    round_spec,
    rounds_of,
    survivors,
    too_large,
    with_round,
)
from optigpu.job.spec import JobSpec, PlanName, Variant
from optigpu.vocabulary import (
    CancelledError,
    DeadlineError,
    DeviceKind,
    Frozen,
    Role,
    SpecError,
    StoppedError,
    VariantStatus,
)

REPLICATE = (sys.executable, "-P", "-m", "optigpu.child.replicate")
"""The program that measures. -P keeps files of the working directory from being taken for modules."""

NONE_DONE: Mapping[int, Outcome] = MappingProxyType({})


class Report(Frozen):
    """The results of a run, how each variant ended, and the gain of each technique.

    It covers the whole job, with the outcomes of earlier attempts that were passed to the run. `stopped` says why the
    job ended before everything was measured; None if it did not. `cancelled` is whether somebody asked for that.
    """

    spec: JobSpec
    results: tuple[Result, ...]
    outcomes: tuple[Outcome, ...]
    attribution: Attribution
    stopped: str | None = None
    cancelled: bool = False

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
    the device; the wait for other processes to rest is part of it. When the job is cancelled or its time is up, whole
    replicates become results, and a variant without one ends with a reason.

    Raises SpecError for a request that is wrong, or a plan with too many variants or too little time, UnsupportedError
    where this machine has no such device, OptiGPUError if the device cannot be locked, and what `on_event` and
    `cancelled` raise. No process is left behind in any case.
    """
    spec = spec if isinstance(spec, JobSpec) else JobSpec.model_validate(spec)
    variants = variants_of(spec)
    if spec.device is not DeviceKind.CPU:
        require_device(spec, probe())
    on_event(
        Planned(variants=tuple(PlannedVariant(index=v.index, role=v.role, label=v.label) for v in variants))
    )
    todo = [variant for variant in variants if variant.index not in done]
    outcomes: dict[int, Outcome] = dict(done)
    again: Samples = ()
    how = _How(program, cancelled, lock_dir, threads, memory_rule)
    if spec.plan is PlanName.SEARCH:
        on_event(estimated(spec, todo))
        stop = _searched(spec, todo, outcomes, on_event, how)
    else:
        plan = plan_time(spec, todo)
        if todo:
            on_event(plan.estimated())
        stop, again = _measured(spec, todo, outcomes, on_event, how, plan)
    attribution = attribute(spec, variants, outcomes, again)
    on_event(Finished(attribution=attribution))
    return _report(spec, outcomes, attribution, stop)


@dataclass(frozen=True)
class _How:
    """What `run` was told of how to measure."""

    program: Sequence[str]
    cancelled: Callable[[], str | None]
    lock_dir: Path | None
    threads: int | None
    memory_rule: MakeMemoryRule


def _measured(
    spec: JobSpec,
    todo: Sequence[Variant],
    outcomes: dict[int, Outcome],
    on_event: Callable[[Event], None],
    how: _How,
    plan: Plan | None = None,
) -> tuple[StoppedError | None, Samples]:
    """Measures variants in one session and adds an outcome for each.

    Returns why it had to stop, if it had, and what the baseline measured again.
    """
    again: Samples = ()
    try:
        with open_session(
            spec,
            [variant.index for variant in todo],
            on_event,
            program=how.program,
            cancelled=how.cancelled,
            lock_dir=how.lock_dir,
            threads=how.threads,
            memory_rule=how.memory_rule,
            plan=plan or plan_time(spec, todo),
        ) as session:
            session.progress.limit(spec.limits.timeout_s)
            if todo:
                wait_for_quiet(session)
            again = _measure(session, todo, outcomes)
    except StoppedError as stop:
        for variant in todo:
            if variant.index not in outcomes:
                outcomes[variant.index] = _unmeasured(variant.index, stop)
                on_event(VariantFinished(outcome=outcomes[variant.index]))
        return stop, again
    return None, again


def _searched(
    spec: JobSpec,
    todo: Sequence[Variant],
    outcomes: dict[int, Outcome],
    on_event: Callable[[Event], None],
    how: _How,
) -> StoppedError | None:
    """Measures a search round by round, and adds the outcome of the last round that each variant took part in.

    That one alone is an event: a variant whose search goes on has not ended. Returns why it had to stop, if it had.
    """
    ends_at = time.monotonic() + spec.limits.timeout_s
    left, held = _within_bytes(spec, todo, outcomes, on_event), dict[int, Outcome]()
    count = rounds_of(len(left))
    stop: StoppedError | None = None
    for number in range(count if left else 0):
        rounds = RoundEvents(on_event, number, count)
        seconds = max(1.0, ends_at - time.monotonic())
        found: dict[int, Outcome] = {}
        try:
            shorter = limited(round_spec(spec, number, count), seconds)
            stop, _ = _measured(shorter, left, found, rounds, how)
        except SpecError as error:
            stop = DeadlineError(str(error))
        for index, outcome in found.items():
            # What a stopped round did not measure keeps the outcome of the round before.
            if index not in held or outcome.result is not None:
                held[index] = with_round(outcome, number, count)
        chosen = survivors(spec, list(found.values()))
        if stop or number == count - 1 or not chosen:
            break
        left = [variant for index in chosen for variant in left if variant.index == index]
    for outcome in held.values():
        outcomes[outcome.index] = outcome
        on_event(VariantFinished(outcome=outcome))
    return stop


def _within_bytes(
    spec: JobSpec, todo: Sequence[Variant], outcomes: dict[int, Outcome], on_event: Callable[[Event], None]
) -> list[Variant]:
    """The variants whose predicted weights keep the limit; the others end at once with the reason."""
    left = []
    for variant in todo:
        reason = too_large(spec, variant, predicted_weight_bytes(variant))
        if reason is None:
            left.append(variant)
            continue
        outcomes[variant.index] = Outcome(
            index=variant.index, status=VariantStatus.UNSUPPORTED, reason=reason
        )
        on_event(VariantFinished(outcome=outcomes[variant.index]))
    return left


def _measure(session: Session, todo: Sequence[Variant], outcomes: dict[int, Outcome]) -> Samples:
    """Adds each outcome as soon as it is known. Raises StoppedError when the job must stop.

    Returns what the baseline measured again at the end if the variants were not all side by side.
    """
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


def _unmeasured(index: int, stop: StoppedError) -> Outcome:
    cancelled = isinstance(stop, CancelledError)
    status = VariantStatus.CANCELLED if cancelled else VariantStatus.FAILED
    return Outcome(
        index=index, status=status, reason=f"{stop} No replicate of this variant was whole by then."
    )


def _report(
    spec: JobSpec, outcomes: Mapping[int, Outcome], attribution: Attribution, stop: StoppedError | None
) -> Report:
    ended = tuple(outcomes[index] for index in sorted(outcomes))
    return Report(
        spec=spec,
        results=tuple(outcome.result for outcome in ended if outcome.result),
        outcomes=ended,
        attribution=attribution,
        stopped=f"{stop} {_kept(ended)}" if stop else None,
        cancelled=isinstance(stop, CancelledError),
    )


def _kept(outcomes: Sequence[Outcome]) -> str:
    """How much of the job was measured before it stopped."""
    results = [outcome.result for outcome in outcomes if outcome.result]
    fewer = sum(VerdictWarning.INCOMPLETE in result.verdict.warnings for result in results)
    return (
        f"Variants with all replicates: {len(results) - fewer}, with fewer: {fewer}, "
        f"with no result: {len(outcomes) - len(results)}."
    )
