"""The plan `batch_scaling`: the largest batch under a limit of memory, by bisection with processes that run out of it.

The limit holds for what is taken after the libraries are loaded: weights, states, activations. On a CPU the kernel
enforces it (RLIMIT_DATA), on a GPU torch's allocator.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from optigpu.child.messages import BatchesReady, BatchTried, TryBatch
from optigpu.conductor.outcome import provenance_of
from optigpu.conductor.processes.child import Child, ask
from optigpu.conductor.quiet import wait_for_quiet
from optigpu.conductor.session import Session
from optigpu.documents.events import VariantFinished, VariantStarted
from optigpu.documents.facts import MeterFacts, RunFacts, plain
from optigpu.documents.result import Measurement, Outcome, Result, Samples, Verdict
from optigpu.fit.fitting import largest
from optigpu.job.measured import measured, summary_of
from optigpu.job.search import ATTEMPTS
from optigpu.job.spec import LARGEST_BATCH, Variant
from optigpu.statistics.intervals import summarise
from optigpu.vocabulary import (
    OutOfMemoryError,
    ReplicateError,
    UnsupportedError,
    VariantStatus,
    new_id,
    utc_now,
)

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
