"""Measures a search: successive halving, in which the processes of the stacks that go on stay.

Starting a process takes seconds, however briefly it measures. So a stack has one process until the last round, where
those that are missing start. A process that had to make room for others is started again if its stack goes on.

The plan `batch_scaling`: the largest batch under a limit of memory, by bisection with processes that run out of it. The
limit holds for what is taken after the libraries are loaded: weights, states, activations. On a CPU the kernel enforces
it (RLIMIT_DATA), on a GPU torch's allocator.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from optigpu.child.messages import BatchesReady, BatchTried, TryBatch
from optigpu.conductor.outcome import provenance_of
from optigpu.conductor.preparation import Preparation, prepare
from optigpu.conductor.processes.child import Child, ask
from optigpu.conductor.processes.groups import Group
from optigpu.conductor.processes.residents import Residents
from optigpu.conductor.quiet import wait_for_quiet
from optigpu.conductor.session import Session
from optigpu.documents.events import Event, VariantFinished, VariantStarted
from optigpu.documents.facts import MeterFacts, RunFacts, plain
from optigpu.documents.result import Measurement, Outcome, Result, Samples, Verdict
from optigpu.fit.fitting import largest
from optigpu.fit.memory import predicted_weight_bytes
from optigpu.job.estimate import plan_time
from optigpu.job.measured import measured, summary_of
from optigpu.job.search import ATTEMPTS, limited, round_spec, rounds_of, survivors, too_large, with_round
from optigpu.job.spec import LARGEST_BATCH, Variant
from optigpu.statistics.intervals import summarise
from optigpu.vocabulary import (
    DeadlineError,
    OutOfMemoryError,
    ReplicateError,
    SpecError,
    StoppedError,
    UnsupportedError,
    VariantStatus,
    new_id,
    utc_now,
)


def search(session: Session, todo: Sequence[Variant], outcomes: dict[int, Outcome]) -> Samples:
    """Adds the outcome of the last round that each variant took part in, and measures no baseline again. That outcome
    alone is an event: a variant whose search goes on has not ended. Raises StoppedError when the job must stop; what a
    stopped round did not measure has the outcome of the round before."""
    # The variants whose predicted weights keep the limit; the others end at once with the reason.
    left = []
    for variant in todo:
        reason = too_large(session.spec, variant, predicted_weight_bytes(variant))
        if reason is None:
            left.append(variant)
            continue
        outcome = Outcome(index=variant.index, status=VariantStatus.UNSUPPORTED, reason=reason)
        outcomes[variant.index] = outcome
        session.on_event(VariantFinished(outcome=outcome))
    found = _Search(session, len(left))
    try:
        found.run(left)
    except StoppedError:
        found.end(outcomes)
        raise
    found.end(outcomes)
    return ()


class _Search:
    """The outcomes of the last round that each variant took part in."""

    def __init__(self, session: Session, candidates: int) -> None:
        self._session, self._count = session, rounds_of(candidates)
        self._held: dict[int, Outcome] = {}

    def run(self, left: Sequence[Variant]) -> None:
        """Measures round by round until one is left, or none is allowed to go on."""
        preparation = prepare(self._session, left)
        with Residents(self._session, 0, preparation.complete) as residents:
            for number in range(self._count):
                chosen = self._measure_round(number, left, residents, preparation)
                left = [variant for index in chosen for variant in left if variant.index == index]
                if not left:
                    break

    def end(self, outcomes: dict[int, Outcome]) -> None:
        for outcome in self._held.values():
            outcomes[outcome.index] = outcome
            self._session.on_event(VariantFinished(outcome=outcome))

    def _measure_round(
        self, number: int, variants: Sequence[Variant], residents: Residents, preparation: Preparation
    ) -> tuple[int, ...]:
        """Measures the variants, as many side by side as fit; returns those that go on, whose processes stay."""
        session = self._round_of(number, variants, residents)
        residents.go_on(session)
        found: dict[int, Outcome] = {}
        chosen: tuple[int, ...] = ()
        waiting = tuple(variants)
        while waiting:
            group = Group(session, waiting, residents)
            try:
                group.measure(preparation)
            finally:
                found |= group.outcomes
                for index, outcome in group.outcomes.items():
                    if index not in self._held or outcome.result is not None:
                        self._held[index] = with_round(outcome, self._session.spec, number, self._count)
            waiting = group.waiting
            chosen = survivors(session.spec, list(found.values()))
            best = [index for index in chosen if index in residents.indexes]
            # Half of the places are for those that wait.
            residents.keep(best[: len(residents.indexes) // 2] if waiting else best)
        return chosen

    def _round_of(self, number: int, variants: Sequence[Variant], residents: Residents) -> Session:
        session = self._session
        shorter = round_spec(session.spec, number, self._count)
        try:
            plan = plan_time(limited(shorter, session.progress.time_left_s), variants)
        except SpecError as error:
            raise DeadlineError(str(error)) from error
        session.progress.begin_round(number, self._count, plan, residents.indexes)

        def tell(event: Event) -> None:
            started_before = isinstance(event, VariantStarted) and number > 0
            if not started_before and not isinstance(event, VariantFinished):
                session.on_event(event)

        return session.in_round(plan, tell)


PROGRAM = (sys.executable, "-P", "-m", "optigpu.child.largest_batch")
"""The program that tries batches. -P keeps files of the working directory from being taken for modules."""
EACH_ON_ITS_OWN = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc maps every tensor by itself and gives it back when it is freed: what an attempt leaves behind would else count
against the next one (man 3 mallopt)."""


def scale_batches(session: Session, todo: Sequence[Variant], outcomes: dict[int, Outcome]) -> Samples:
    """Adds the outcome of each variant, one after the other; nothing is measured again. Raises StoppedError."""
    wait_for_quiet(session)
    for variant in todo:
        session.on_event(VariantStarted(index=variant.index))
        session.progress.begin(variant.index, 0, "starting")
        outcomes[variant.index] = _outcome(session, variant)
        session.progress.end()
        session.on_event(VariantFinished(outcome=outcomes[variant.index]))
    return ()


class LargestBatch:
    """The largest batch of a variant, 0 where not even one sample fits, and whether each that was tried did. A process
    tries them; `restarts` counts those that died of it and had another one in their place, `why` is the last error."""

    def __init__(
        self, session: Session, variant: Variant, program: Sequence[str], process: ExitStack
    ) -> None:
        self.largest, self.restarts, self.why, self.facts = 0, 0, "", RunFacts()
        self._fit: dict[int, bool] = {}
        self._session, self._variant, self._program, self._process = session, variant, program, process
        self._child: Child | None = None
        self._has_loaded = False

    @property
    def tried(self) -> tuple[tuple[int, bool], ...]:
        """Every attempt in order."""
        return tuple(self._fit.items())

    def fits(self, batch: int) -> bool:
        """Whether a request of that batch finds enough memory. Raises what `largest_batch` raises."""
        if batch not in self._fit:
            self._fit[batch] = self._try(batch)
        return self._fit[batch]

    def _try(self, batch: int) -> bool:
        progress = self._session.progress
        try:
            child = self._child or self._start()
            progress.show(f"trying a batch of {batch}")
            tried = ask(child, TryBatch(batch_size=batch), BatchTried, progress)
        except ReplicateError as error:
            has_died = self._child is not None and self._child.has_died
            if not has_died and not isinstance(error, OutOfMemoryError):
                raise ReplicateError(f"A batch of {batch} failed: {error}") from error
            self.why = str(error)
            self.restarts += has_died
            if has_died or not self._has_loaded:
                self._child, self._has_loaded = None, False
                self._process.close()
            return False
        self.why = tried.why or self.why
        return tried.fits

    def _start(self) -> Child:
        session = self._session
        self._child = self._process.enter_context(
            session.child(self._variant, self._program, EACH_ON_ITS_OWN)
        )
        assignment = session.assignment(self._variant, 0)
        self.facts = ask(self._child, assignment, BatchesReady, session.progress).facts
        self._has_loaded = True
        return self._child


def largest_batch(session: Session, variant: Variant, program: Sequence[str] = PROGRAM) -> LargestBatch:
    """Doubles the batch of the variant's workload until memory runs out, or the job's bound is reached; then bisects.
    Raises UnsupportedError where this machine or this model cannot do it, ReplicateError where a request fails for
    another reason than memory, such as a batch that the workload does not take, and what `progress.check` raises."""
    most = session.spec.limits.max_batch
    with ExitStack() as process:
        found, bound = LargestBatch(session, variant, program, process), 1
        while bound < most and found.fits(bound):
            bound = min(2 * bound, most)
        found.largest = largest(found.fits, 1, bound)
        return found


def _outcome(session: Session, variant: Variant) -> Outcome:
    status = VariantStatus.FAILED
    try:
        with session.progress.advance(ATTEMPTS):
            session.require_sound(variant)
            found = largest_batch(session, variant)
        if found.largest:
            return _with_result(session, variant, found)
        limit = variant.memory_limit_bytes
        reason = f"Not even a batch of 1 found enough memory under {limit} bytes: {found.why}"
    except UnsupportedError as error:
        status, reason = VariantStatus.UNSUPPORTED, str(error)
    except ReplicateError as error:
        reason = str(error)
    return Outcome(index=variant.index, status=status, reason=reason)


def _with_result(session: Session, variant: Variant, found: LargestBatch) -> Outcome:
    samples: Samples = ((float(found.largest),),)
    summary = summarise(Measurement(name=LARGEST_BATCH, samples=samples))
    most = session.spec.limits.max_batch
    if found.largest == most:
        reason = f"{most} is the most that limits.max_batch lets it try."
        summary = summary.model_copy(update={"reason": reason})
    notes = {"batches_tried": plain(found.tried), "processes_that_died": found.restarts}
    provenance = provenance_of(session.spec, variant, session.environment, found.facts)
    result = Result(
        id=new_id(),
        created_at=utc_now(),
        variant=summary_of(measured(variant, provenance)),
        verdict=Verdict(valid=True),
        metrics={LARGEST_BATCH: summary},
        facts=found.facts.with_readings(MeterFacts(recorded=notes)),
        environment=session.environment,
        seed=session.spec.seed,
        provenance=provenance,
    )
    kept = {LARGEST_BATCH: samples}
    return Outcome(index=variant.index, status=VariantStatus.SUCCEEDED, result=result, samples=kept)
