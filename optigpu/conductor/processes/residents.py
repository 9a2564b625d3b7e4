"""The resident processes of several variants: prepared one by one, timed in turns, then metered one by one.

As many as there are cores import their libraries at the same time, before any of them loads its model. In
turns a change of the machine's speed affects all of them alike, so their ratios stay the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Self

from optigpu.child.messages import Begin, Ready, Started
from optigpu.conductor.processes.asking import ask, hear
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.rounds import Replicate, TimedRounds, audit, read_meters
from optigpu.conductor.session import Session
from optigpu.documents.events import VariantStarted
from optigpu.job.estimate import START
from optigpu.job.spec import Variant
from optigpu.meters import METERS
from optigpu.vocabulary import ReplicateError, UnsupportedError

MOST_RESIDENT = 8
"""The most variants side by side. If the worker dies their results are lost, so they must not be all of a long job."""


@dataclass(frozen=True)
class _Resident:
    """A process that is ready to measure."""

    variant: Variant
    child: Child
    ready: Ready
    rounds: TimedRounds


class Residents:
    """One replicate of several variants, their processes resident at once as far as the memory allows.

    After `measure`, each variant is in exactly one of `replicates`, `errors` (both by the variant's index) and
    `waiting`, which holds those that the memory had no space for; none of these loaded its model.
    """

    def __init__(self, session: Session, number: int) -> None:
        """`number` is the replicate's, from 0."""
        self.replicates: dict[int, Replicate] = {}
        self.errors: dict[int, UnsupportedError | ReplicateError] = {}
        self.waiting: tuple[Variant, ...] = ()
        self._session, self._number = session, number
        self._memory = session.memory_rule(session.spec.device, session.environment)
        # The processes that have started and are not ready yet, and for each variant what ends its process.
        self._started: dict[int, Child] = {}
        self._ready: list[_Resident] = []
        self._ends: dict[int, ExitStack] = {}
        self._processes = ExitStack()

    def measure(self, variants: Sequence[Variant]) -> Self:
        """Measures as many of the variants as fit into memory together, always at least one.

        Raises StoppedError, and what the session's listener raises; no process is left behind. `replicates` then holds
        those that are whole.
        """
        with self._processes:
            self._prepare(variants)
            self._take_turns()
            for resident in self._ready:
                if resident.variant.index not in self.errors:
                    self._finish(resident)
                self._ends[resident.variant.index].close()
        return self

    def _prepare(self, variants: Sequence[Variant]) -> None:
        for position, variant in enumerate(variants):
            if self._ready and not (self._has_space() and self._has_time(variant)):
                self.waiting = tuple(variants[position:])
                break
            if self._number == 0:
                self._session.on_event(VariantStarted(index=variant.index))
            self._make_ready(variants[position:])
        for index in self._started:
            self._ends[index].close()

    def _has_space(self) -> bool:
        return len(self._ready) < MOST_RESIDENT and self._memory.has_space()

    def _has_time(self, variant: Variant) -> bool:
        """Whether those that are ready and one more can be measured, for their least time at least."""
        indexes = [*(resident.variant.index for resident in self._ready), variant.index]
        return self._session.progress.has_time_for([(index, self._number) for index in indexes])

    def _make_ready(self, variants: Sequence[Variant]) -> None:
        """Has the first of the variants load its model. If its process has not started, others start with it."""
        session, progress, variant = self._session, self._session.progress, variants[0]
        progress.begin(variant.index, self._number, "starting")
        with self._failing_alone(variant):
            with progress.advance(START), progress.half_of_the_time_left("Making a process ready"):
                if variant.index not in self._ends:
                    self._start(variants[: self._side_by_side()])
                if variant.index in self.errors:
                    raise self.errors[variant.index]
                child = self._started.pop(variant.index)
                assignment = session.assignment(variant, self._number)
                ready = ask(child, assignment, Ready, progress)
            progress.compiled(ready.compile_s)
            self._memory.add(child.pid)
            rounds = TimedRounds(child, ready, assignment, session.monitor)
            self._ready.append(_Resident(variant, child, ready, rounds))

    def _side_by_side(self) -> int:
        """How many processes import their libraries at the same time. That takes seconds of one core each."""
        if not self._memory.has_space():
            return 1
        return max(1, min(self._session.threads, MOST_RESIDENT - len(self._ready)))

    def _start(self, variants: Sequence[Variant]) -> None:
        """Starts a process for each of the variants, and waits until all of them have imported their libraries.

        None of them loads a model meanwhile, since the time of that is measured.
        """
        for variant in variants:
            self._ends[variant.index] = self._processes.enter_context(ExitStack())
            with self._failing_alone(variant):
                self._session.require_sound(variant)
                child = self._ends[variant.index].enter_context(self._session.child(variant))
                child.tell(Begin(backend=variant.backend, model=variant.model is not None))
                self._started[variant.index] = child
        for variant in variants:
            if variant.index in self._started:
                with self._failing_alone(variant):
                    hear(self._started[variant.index], Started, self._session.progress)

    def _take_turns(self) -> None:
        """Measures rounds in turns until each variant has enough of them or has failed."""
        active = self._ready
        while active := [each for each in active if self._is_active(each)]:
            for resident in active:
                self._session.progress.begin(resident.variant.index, self._number, "measuring")
                with self._failing_alone(resident.variant):
                    resident.rounds.measure_one(self._session.progress)
                    if resident.rounds.are_over:
                        self._session.progress.end_rounds()

    def _is_active(self, resident: _Resident) -> bool:
        return resident.variant.index not in self.errors and not resident.rounds.are_over

    def _finish(self, resident: _Resident) -> None:
        """Runs the audit with fresh inputs and then the meters of this replicate."""
        variant, progress = resident.variant, self._session.progress
        progress.begin(variant.index, self._number, "checking")
        with self._failing_alone(variant):
            audited, during = audit(resident.child, resident.ready, self._session.monitor, progress)
            metered = read_meters(resident.child, self._meters(), progress)
            self.replicates[variant.index] = replace(
                resident.rounds.replicate(), audit=audited, audit_sample=during, metered=metered
            )
            progress.end()

    def _meters(self) -> list[str]:
        """The meters to read in this replicate; some are read only in the first one."""
        names = [name for name in self._session.spec.measure.meters if name != "latency"]
        return [name for name in names if self._number == 0 or not METERS[name].once]

    @contextmanager
    def _failing_alone(self, variant: Variant) -> Iterator[None]:
        """An error within the block ends this variant's process only."""
        try:
            yield
        except (UnsupportedError, ReplicateError) as error:
            self.errors[variant.index] = error
            self._started.pop(variant.index, None)
            self._ends[variant.index].close()
