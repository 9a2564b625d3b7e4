"""run(spec, on_event) -> Report: a job from its request to its results. Loads no torch.

Variants are measured side by side as far as the memory allows; each replicate of a variant is a separate process.
An error ends only its own variant.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optigpu.conductor.largest_batch import scale_batches
from optigpu.conductor.preparation import needs, prepare
from optigpu.conductor.preparation import took as prepared
from optigpu.conductor.processes.groups import Group, measure_again
from optigpu.conductor.processes.memory_budget import MakeMemoryRule, MemoryBudget
from optigpu.conductor.progress import WAITING_FOR_DEVICE
from optigpu.conductor.search import search
from optigpu.conductor.session import Session, environment_for, open_session
from optigpu.conductor.verdicts.host_monitor import SERVICE, HostSample
from optigpu.documents.events import Event, Finished, Planned, PlannedVariant, VariantFinished, Waiting
from optigpu.documents.result import (
    Attribution,
    Environment,
    Outcome,
    Result,
    Rough,
    Samples,
    VerdictWarning,
)
from optigpu.documents.timeline import Span
from optigpu.hardware import probe
from optigpu.hardware.device_kinds import KINDS, devices_of, no_device
from optigpu.job.attribution import attribute
from optigpu.job.estimate import AUDIT, guess_of, within_deadline
from optigpu.job.plan import variants_of
from optigpu.job.rates import NO_RATES, Need, Rates, Took, keep_rates, known_rates
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
    stop, again, spans, took = _measured(opening, todo, outcomes, on_event)
    if tuple(program) == REPLICATE:  # another program takes another time
        keep_rates(_learned(rates, spec, todo, needed, spans, took))
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
) -> tuple[StoppedError | None, Samples, tuple[Span, ...], Mapping[tuple[int, str], float]]:
    """Measures variants in one session and adds an outcome for each. Returns why the session had to stop, if it had,
    what the baseline measured again, where the time went, and what each part of a variant took."""
    again: Samples = ()
    spans: tuple[Span, ...] = ()
    took: Mapping[tuple[int, str], float] = {}
    rough: Mapping[int, Rough] = {}
    try:
        with opening as session:
            session.progress.limit(session.spec.limits.timeout_s)
            try:
                if todo:
                    wait_for_quiet(session)
                    again = _MEASURES.get(session.spec.plan, _measure)(session, todo, outcomes)
            finally:
                spans, took = session.progress.spans(), session.progress.took
                rough = session.rough.found
    except StoppedError as stop:
        status = VariantStatus.CANCELLED if isinstance(stop, CancelledError) else VariantStatus.FAILED
        reason = f"{stop} No replicate of this variant was whole by then."
        for index in (variant.index for variant in todo if variant.index not in outcomes):
            outcomes[index] = Outcome(index=index, status=status, reason=reason, rough=rough.get(index))
            on_event(VariantFinished(outcome=outcomes[index]))
        return stop, again, spans, took
    return None, again, spans, took


def _learned(
    rates: Rates,
    spec: JobSpec,
    variants: Sequence[Variant],
    needed: Sequence[Need],
    spans: Sequence[Span],
    took: Mapping[tuple[int, str], float],
) -> Rates:
    """The rates after a run."""
    by_index = {variant.index: variant for variant in variants}
    guesses = {variant.index: guess_of(spec, variant).seconds for variant in variants}
    parts = {
        (by_index[index], part): Took(seconds, guesses[index].get(part, 0.0))
        for (index, part), seconds in took.items()
    }
    job_s = {span.doing: span.seconds for span in spans if span.index is None and span.doing not in WAITS}
    is_prepared = any(part == AUDIT for _, part in took)
    return rates.with_parts(parts).with_preparing(prepared(needed, job_s) if is_prepared else {})


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


LOOKING = "looking for other processes"
WAITS = (WAITING_FOR_DEVICE, LOOKING)
LOOK_S = 1.0
"""The kernel counts CPU time in hundredths of a second: a shorter look would show little."""
POLL_S = 0.2
BUSY_CORES, BUSY_SHARE, BUSY_CORES_AT_MOST = 0.25, 0.01, 0.5
"""So many cores of others are worth waiting for: a hundredth of the host's, within these bounds. Rounds that are set
aside and wider intervals deal with less, and a steady fifth of a core would make every job wait in vain."""
FREE_CORES = 0.5
"""A job on a GPU starts beside any load that leaves so much of the CPUs idle."""
WORTH_NAMING = 0.2
"""Of the CPU time of all others."""


def wait_for_quiet(session: Session) -> None:
    """Returns as soon as a look shows that other processes rest, and after `limits.wait_for_quiet_s` in any case.
    Raises what `progress.check` raises."""
    wait_s = session.spec.limits.wait_for_quiet_s
    if wait_s == 0:
        return
    session.progress.show(LOOKING)
    busy = _look(session)
    if busy is None:
        return
    session.on_event(Waiting(doing=_doing(busy, wait_s), up_to_s=wait_s))
    until = time.monotonic() + wait_s
    while busy is not None and (left_s := until - time.monotonic()) > 0:
        session.progress.show(_doing(busy, left_s), LOOKING)
        busy = _look(session)


def _look(session: Session) -> str | None:
    """Who is at work during one look; None if nobody is."""
    before, until = session.monitor.read(), time.monotonic() + LOOK_S
    while (left_s := until - time.monotonic()) > 0:
        session.progress.check()
        time.sleep(min(POLL_S, left_s))
    return at_work(session.spec.device, session.monitor.between(before, session.monitor.read()))


def _doing(busy: str, wait_s: float) -> str:
    return f"{busy}; waiting up to {math.ceil(wait_s)} s for quiet"


def at_work(device: DeviceKind, sample: HostSample) -> str | None:
    """Who uses so much of the machine that a job should wait, for example "cc1plus uses 1.1 of 2 cores"."""
    if sample.gpu_foreign:
        several = sample.gpu_foreign > 1
        return (
            f"{sample.gpu_foreign} other processes use the GPU" if several else "Another process uses the GPU"
        )
    has_free_cores = sample.idle_s is None or sample.idle_s >= FREE_CORES * sample.wall_s
    if sample.foreign_s is None or (device is not DeviceKind.CPU and has_free_cores):
        return None
    named = {name: seconds for name, seconds in sample.named.items() if name != SERVICE}
    others_s = sample.foreign_s - sample.named.get(SERVICE, 0.0)
    cores = others_s / sample.wall_s
    if cores <= min(max(BUSY_CORES, BUSY_SHARE * sample.cpus), BUSY_CORES_AT_MOST):
        return None
    worth_naming = (name for name, seconds in named.items() if seconds >= WORTH_NAMING * others_s)
    names = sorted(worth_naming, key=lambda name: -named[name])
    who = f"{' and '.join(names)} {'uses' if len(names) == 1 else 'use'}" if names else "Other processes use"
    return f"{who} {cores:.1f} of {sample.cpus} core{'s' if sample.cpus > 1 else ''}"
