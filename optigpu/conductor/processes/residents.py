"""The resident processes of several variants: prepared one by one, timed in laps, then metered one by one.

As many as there are cores import their libraries at the same time, before any of them loads its model. In the turns of
a lap a change of the machine's speed affects all of them alike, so their ratios stay the same. A search lets the
processes of those that go on stay from one of its rounds to the next.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from optigpu.backends.converted import remove_used
from optigpu.child.messages import (
    LOADING,
    WARMING_UP,
    Assignment,
    Begin,
    Loaded,
    Metered,
    Ready,
    Round,
    RunLook,
    RunMeter,
    RunRound,
    RunWarmUp,
    Started,
)
from optigpu.conductor.processes.answers import AnswerCheck
from optigpu.conductor.processes.child import Child, Saw, Wanted, Watch, ask, hear
from optigpu.conductor.processes.rounds import (
    ROUND_S,
    Metering,
    MeterReading,
    Replicate,
    TimedRounds,
    audit,
    in_turns,
)
from optigpu.conductor.saturation import Watched
from optigpu.conductor.session import Session
from optigpu.conductor.verdicts.disturbance import Yardstick
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostReading, HostSample
from optigpu.documents.events import VariantStarted
from optigpu.documents.facts import KernelFacts, WeightFacts
from optigpu.job.estimate import ROUGH_QUALITY_S, START
from optigpu.job.spec import Variant
from optigpu.meters import METERS
from optigpu.models.reference import parse_reference
from optigpu.quality.text import HELLASWAG
from optigpu.vocabulary import (
    CrashError,
    DamagedModelError,
    DeviceKind,
    Frozen,
    ReplicateError,
    Role,
    Task,
    UnsupportedError,
)
from optigpu.workloads.kernel import Kernel


class WarmUpWatch:
    """A Watch that passes everything on, and reads the counters when the process says that it warms up."""

    def __init__(self, progress: Watch, monitor: HostMonitor) -> None:
        self._progress, self._monitor = progress, monitor
        self._before: HostReading | None = None
        self.doing = LOADING

    def check(self) -> None:
        self._progress.check()

    def show(self, doing: str) -> None:
        """The last time that it says so counts: what compiles comes before."""
        self._progress.show(doing)
        self.doing = doing
        if doing == WARMING_UP:
            self._before = self._monitor.read()

    def sample(self) -> HostSample | None:
        """What happened since then; None for a process that never said so. To be asked when it is ready."""
        return self._monitor.between(self._before, self._monitor.read()) if self._before else None


MOST_RESIDENT = 12
"""The most variants side by side. If the worker dies their results are lost, so they must not be all of a long job."""

LAP_S = 2 * ROUND_S
"""Seconds of a lap: many variants have shorter rounds, so that what disturbs a moment costs one lap and no long one."""


ROUGH_S, MOST_PAIRS = 0.5, 8
"""A variant is first compared with the baseline for so long, by so many pairs of short requests at most."""
MAKING_READY = "Making a process ready"


@dataclass(frozen=True)
class _Loaded:
    """A process with its model."""

    variant: Variant
    child: Child
    assignment: Assignment

    def ask(
        self, message: Frozen, wanted: type[Wanted], watch: WarmUpWatch, saw: Saw = lambda _: None
    ) -> Wanted:
        """Raises what `ask` raises; DamagedModelError for a process that crashed on a kept conversion, which is removed
        so that it is made anew; UnsupportedError for one that crashed on a model's own files."""
        try:
            return ask(self.child, message, wanted, watch, saw)
        except CrashError as error:
            removed = remove_used(Path(self.assignment.folder), self.child.pid)
            if removed:
                raise DamagedModelError(
                    f"The engine crashed on {' and '.join(removed)}, a kept conversion that may be damaged. It has "
                    f"been removed; run the job again. {error}"
                ) from error
            model = self.assignment.variant.model
            is_loading = isinstance(message, Assignment) and watch.doing == LOADING
            if not is_loading or model is None or parse_reference(model).kind not in ("path", "hub"):
                raise
            raise UnsupportedError(f"{model} is damaged or not supported: {error}") from error


@dataclass(frozen=True)
class _Resident(_Loaded):
    """A process that is ready to measure."""

    ready: Ready
    rounds: TimedRounds


class Residents(AbstractContextManager["Residents"]):
    """One replicate of several variants, their processes resident at once as far as the memory allows. After
    `measure`, each of the variants is in exactly one of `replicates`, `errors` (both by the variant's index) and
    `waiting`, which holds those that the memory had no space for; none of these loaded its model."""

    def __init__(self, session: Session, number: int, prepare: Callable[[], None] = lambda: None) -> None:
        """`number` is the replicate's, from 0. `prepare` is called when the first process is ready."""
        self.replicates: dict[int, Replicate] = {}
        self.errors: dict[int, UnsupportedError | ReplicateError] = {}
        self.waiting: tuple[Variant, ...] = ()
        self._session, self._number, self._prepare_job = session, number, prepare
        self._memory = session.memory_rule(session.spec.device, session.environment)
        # The processes that have started and are not ready yet, and for each variant what ends its process.
        self._started: dict[int, Child] = {}
        self._ready: list[_Resident] = []
        self._ends: dict[int, ExitStack] = {}
        # The processes that have shown first figures.
        self._looked: dict[int, _Loaded] = {}
        # What each resident process's meters have read, in the rounds of a search before this one too.
        self._readings: dict[int, tuple[MeterReading, ...]] = {}
        # How the answers of those that run brought code were judged.
        self._kernels: dict[int, KernelFacts] = {}
        self._processes = ExitStack()

    def measure(self, variants: Sequence[Variant], *, stay: bool = False) -> Self:
        """Measures as many of the variants as fit into memory together, and ends all processes.

        At least one is measured, unless others are resident. With `stay`, in a block of these residents, their
        processes stay until `keep`, or the block's end, ends them. Raises StoppedError, and what the session's listener
        raises: no process is left behind, and `replicates` then holds those that are whole.
        """
        block: AbstractContextManager[object] = nullcontext() if stay else self
        with block:
            self.replicates, self.errors, self.waiting = {}, {}, ()
            asked, known = {variant.index for variant in variants}, self.indexes
            self._prepare([variant for variant in variants if variant.index not in known])
            measured = [resident for resident in self._ready if resident.variant.index in asked]
            self._check_answers(measured)
            self._take_turns(measured)
            self._time_answers(measured)
            for resident in measured:
                if resident.variant.index not in self.errors:
                    self._finish(resident)
                if not stay:
                    self._ends[resident.variant.index].close()
            self.keep(self.indexes - self.errors.keys())
            return self

    @property
    def indexes(self) -> frozenset[int]:
        return frozenset(resident.variant.index for resident in self._ready)

    def keep(self, indexes: Collection[int]) -> None:
        """Ends the processes of all variants but these."""
        for resident in self._ready:
            if resident.variant.index not in indexes:
                self._ends[resident.variant.index].close()
                self._readings.pop(resident.variant.index, None)
        self._ready = [resident for resident in self._ready if resident.variant.index in indexes]

    def go_on(self, session: Session) -> None:
        """A new round of a search begins, as that session asks. Nothing that was timed before is part of it: by that
        its variants were chosen."""
        self._session = session
        for place, each in enumerate(self._ready):
            assignment = session.assignment(each.variant, self._number)
            rounds = TimedRounds(each.child, each.ready, assignment, session.monitor)
            self._ready[place] = replace(each, rounds=rounds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ready = []
        self._processes.__exit__(kind, error, trace)

    def _prepare(self, variants: Sequence[Variant]) -> None:
        """Loads those that fit, and looks at each as soon as it is loaded; only then do they warm up, which takes long.
        Those that compile come last: the others need not wait for them."""
        ordered, loaded = sorted(variants, key=lambda variant: variant.compiles), list[_Loaded]()
        for position, variant in enumerate(ordered):
            resident = self.indexes | {each.variant.index for each in loaded}
            # Those that are resident and one more, for their least time at least.
            units = [(index, self._number) for index in (*resident, variant.index)]
            has_time = self._session.progress.has_time_for(units)
            if resident and not (len(resident) < MOST_RESIDENT and self._memory.has_space() and has_time):
                waiting = {each.index for each in ordered[position:]}
                self.waiting = tuple(each for each in variants if each.index in waiting)
                break
            if self._number == 0:
                self._session.on_event(VariantStarted(index=variant.index))
            loaded += self._make_ready(ordered[position:], MOST_RESIDENT - len(resident))
        for index in self._started:
            self._ends[index].close()
        self._started.clear()
        places = [variant.index for variant in variants]
        new = [each for each in (*self._ready, *loaded) if each.variant.index in places]
        if new:
            self._prepare_job()
        self._look_at_quality(new)
        for each in loaded:
            if each.variant.index not in self.errors:
                self._warm_up(each)
        self._ready.sort(
            key=lambda each: places.index(each.variant.index) if each.variant.index in places else -1
        )

    def _make_ready(self, variants: Sequence[Variant], room: int) -> list[_Loaded]:
        """Has the first of the variants load its model, and look at it or warm up. If its process has not started,
        others start with it, no more than there is `room` for. Returns it if it has yet to warm up."""
        session, progress, variant = self._session, self._session.progress, variants[0]
        progress.begin(variant.index, self._number, "starting")
        waiting: list[_Loaded] = []
        weights: WeightFacts | None = None
        with self._failing_alone(variant):
            watch = WarmUpWatch(progress, session.monitor)
            with progress.advance(START, ends=False), progress.half_of_the_time_left(MAKING_READY):
                if variant.index not in self._started and variant.index not in self.errors:
                    # Importing takes seconds of one core each.
                    side_by_side = min(session.threads, room)
                    self._start(variants[: max(1, side_by_side) if self._memory.has_space() else 1])
                if variant.index in self.errors:
                    raise self.errors[variant.index]
                if self._number == 0:  # the others measure what it measured
                    session.saturation.require_below(variant)
                child, waits = self._started.pop(variant.index), self._number == 0 and _looks_first(variant)
                assignment = session.assignment(variant, self._number).model_copy(update={"waits": waits})
                found = _Loaded(variant, child, assignment)
                if waits:
                    weights = found.ask(assignment, Loaded, watch).weights
                    self._memory.add(child.pid)
            if waits:
                progress.loaded(compiles=variant.compiles)
                self._look(found, weights)
                waiting.append(found)
            else:
                self._warm_up(found)
        return waiting

    def _warm_up(self, loaded: _Loaded) -> None:
        """The process warms up, and is ready then."""
        session, progress, variant = self._session, self._session.progress, loaded.variant
        progress.turn_to(variant.index, self._number)
        with self._failing_alone(variant):
            watch = WarmUpWatch(progress, session.monitor)
            with progress.advance(START), progress.half_of_the_time_left(MAKING_READY):
                order = RunWarmUp() if loaded.assignment.waits else loaded.assignment
                ready = loaded.ask(order, Ready, watch, partial(session.rough.saw, variant))
                warm_up = watch.sample()
            if self._number == 0:
                session.saturation.judge(
                    variant, ready, session.spec.measure, partial(self._watch_queue, variant, loaded.child)
                )
            progress.ready(ready.compile_s)
            assignment = session.assignment(variant, self._number)
            rounds = TimedRounds(loaded.child, ready, assignment, session.monitor, warm_up)
            resident = _Resident(variant, loaded.child, loaded.assignment, ready, rounds)
            self._ready.append(resident)
            if not loaded.assignment.waits:
                self._memory.add(loaded.child.pid)
                if self._number == 0:
                    self._look(resident, ready.facts.weights)

    def _look(self, resident: _Loaded, weights: WeightFacts | None) -> None:
        """Tells the first figures: by short requests, where none was seen while it warmed up, and by turns with the
        baseline for ROUGH_S."""
        session, variant, rough = self._session, resident.variant, self._session.rough
        session.progress.begin(variant.index, self._number, "measuring roughly")
        with session.progress.half_of_the_time_left("Measuring roughly"):
            if _looks_first(variant):
                self._short(resident)  # the first one makes what the engine needs
                rough.looked(variant, self._short(resident))
            rough.told(variant.index, weight_bytes=weights.bytes if weights else None)
            self._looked[variant.index] = resident
            compared = rough.baseline_of.get(variant.index)
            baseline = None if compared is None else self._looked.get(compared)
            if baseline is not None and not baseline.child.has_died:
                self._look_by_turns(baseline, resident)

    def _look_by_turns(self, baseline: _Loaded, resident: _Loaded) -> None:
        theirs, ours, began = list[Sequence[float]](), list[Sequence[float]](), time.monotonic()
        for turn in range(MOST_PAIRS):
            if turn and time.monotonic() - began >= ROUGH_S:
                break
            for each, seen in ((baseline, theirs), (resident, ours)):
                # What a warm-up has shown is one request, however often it is read.
                if not turn or _has_short(each.variant):
                    seen.append(self._short(each))
        self._session.rough.beside(resident.variant.index, theirs, ours)

    def _short(self, resident: _Loaded) -> Sequence[float]:
        """The metric by a short request; by the last one of the warm-up where there is none."""
        rough, variant = self._session.rough, resident.variant
        if not _has_short(variant):
            return (rough.found[variant.index].value,)
        watch = WarmUpWatch(self._session.progress, self._session.monitor)
        return resident.ask(RunLook(), Round, watch).samples.get(rough.metric, ())

    def _look_at_quality(self, residents: Sequence["_Loaded"]) -> None:
        """Reads the quality of a few tokens of each."""
        session, measure = self._session, self._session.spec.measure
        if self._number or "quality" not in measure.meters or measure.quality.text == HELLASWAG:
            return
        for each in residents:
            variant, index = each.variant, each.variant.index
            decodes = variant.workload.task is Task.DECODING and not variant.workload.is_served
            is_compared = decodes and variant.role is not Role.BASELINE
            if not is_compared or index in self.errors or index not in session.rough.found:
                continue
            session.progress.begin(index, self._number, "reading quality roughly")
            with (
                self._failing_alone(variant),
                session.progress.half_of_the_time_left("Reading quality roughly"),
            ):
                order = RunMeter(meter="quality", seconds=ROUGH_QUALITY_S)
                session.rough.read(index, ask(each.child, order, Metered, session.progress))

    def _watch_queue(self, variant: Variant, child: Child) -> Watched:
        progress, monitor = self._session.progress, self._session.monitor
        progress.show("watching the queue")
        before = monitor.read()
        found = ask(child, RunRound(seconds=ROUND_S), Round, progress)
        sample = monitor.between(before, monitor.read())
        yardstick = Yardstick(variant.device, monitor.fastest_probe_s)
        return Watched(found.loads, yardstick.marks(sample), sample.wall_s)

    def _start(self, variants: Sequence[Variant]) -> None:
        """Starts a process for each of the variants, and waits until all have imported their libraries; none loads a
        model meanwhile, since the time of that is measured."""
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

    def _take_turns(self, residents: Sequence[_Resident]) -> None:
        """Measures laps until each variant has enough rounds or has failed."""
        active = list(residents)
        while active := self._going_on(active):
            if len(active) > 1:
                self._measure_lap(active)
                # Who comes first changes: nobody's turns are always the later ones of a machine that slows down.
                active.reverse()
            else:
                (resident,) = active
                self._session.progress.begin(resident.variant.index, self._number, "measuring")
                with self._failing_alone(resident.variant):
                    resident.rounds.measure_one(self._session.progress)

    def _going_on(self, residents: Sequence[_Resident]) -> list[_Resident]:
        """Those that need another round. Of a single process each, the ratio of two has an interval by the requests of
        both, so that turns of either must have the other beside them: whoever has enough goes on until all have."""
        alive = [each for each in residents if each.variant.index not in self.errors]
        found = [each for each in alive if not each.rounds.are_over]
        if found and self._session.replicates == 1:
            found = [each for each in alive if each.rounds.can_go_on]
        for resident in alive:
            if resident not in found:
                self._session.progress.turn_to(resident.variant.index, self._number)
                self._session.progress.end_rounds()
        return found

    def _measure_lap(self, residents: Sequence[_Resident]) -> None:
        """One round of each, in turns. What disturbs the lap disturbs them all."""
        session, round_s = self._session, min(ROUND_S, LAP_S / len(residents))
        for resident in residents:
            session.progress.begin(resident.variant.index, self._number, "measuring")
        before = session.monitor.read()
        counts = [resident.rounds.begin(round_s) for resident in residents]
        for place in in_turns(counts):
            variant, rounds = residents[place].variant, residents[place].rounds
            if variant.index not in self.errors:
                session.progress.turn_to(variant.index, self._number)
                with self._failing_alone(variant):
                    rounds.take_turn(session.progress)
        sample = session.monitor.between(before, session.monitor.read())
        for resident in residents:
            if resident.variant.index not in self.errors:
                resident.rounds.end(sample)

    def _check_answers(self, residents: Sequence[_Resident]) -> None:
        """Compares the answers of code that was brought with the reference's. Wrong ones end its variant."""
        for each in residents:
            with self._failing_alone(each.variant):
                self._judge(each, "Checking the answers")

    def _time_answers(self, residents: Sequence[_Resident]) -> None:
        for each in residents:
            if each.variant.index not in self.errors:
                with self._failing_alone(each.variant):
                    self._judge(each, "Timing the answers")

    def _judge(self, resident: _Resident, doing: str) -> None:
        """Compares a process with the reference's: that which is resident, else a new one. The second time, after its
        rounds, it is timed."""
        session, variant, workload = self._session, resident.variant, resident.variant.workload
        wanted = workload.referee if isinstance(workload, Kernel) else None
        if wanted is None or not isinstance(workload, Kernel):
            return
        session.progress.begin(variant.index, self._number, doing.lower())
        with session.progress.half_of_the_time_left(doing), ExitStack() as stack:
            standing = (each for each in self._ready if each.variant.index not in self.errors)
            found = next((each for each in standing if each.variant.workload == wanted), None)
            if found:
                child = found.child
            else:
                referee = variant.model_copy(update={"workload": wanted})
                child = stack.enter_context(session.child(referee))
                order = session.assignment(referee, self._number).model_copy(update={"timed": False})
                ask(child, order, Ready, session.progress)
            folder = Path(resident.assignment.folder)
            judge = AnswerCheck(resident.child, child, workload, folder, session.progress)
            told_s, before = resident.rounds.typical, self._kernels.get(variant.index)
            if before is None or told_s is None:
                self._kernels[variant.index] = judge.check()
            else:
                reference_s = found.rounds.typical if found else None
                self._kernels[variant.index] = judge.timed(before, told_s, reference_s)

    def _finish(self, resident: _Resident) -> None:
        variant, progress = resident.variant, self._session.progress
        progress.begin(variant.index, self._number, "checking with fresh inputs")
        with self._failing_alone(variant):
            audited, during = audit(resident.child, resident.ready, self._session.monitor, progress)
            before = self._readings.get(variant.index, ())
            # Not what the process has read before, and some only in the first replicate.
            done = {"latency", *(reading.metered.meter for reading in before)}
            names = [name for name in self._session.spec.measure.meters if name not in done]
            names = [name for name in names if self._number == 0 or not METERS[name].once]
            metering = Metering(resident.child, variant.device, self._session.monitor, progress)
            readings = (*before, *metering.read(names))
            self._readings[variant.index] = readings
            self.replicates[variant.index] = replace(
                resident.rounds.replicate(),
                audit=audited,
                audit_sample=during,
                readings=readings,
                kernel=self._kernels.get(variant.index),
            )
            progress.end()

    @contextmanager
    def _failing_alone(self, variant: Variant) -> Iterator[None]:
        """An error within the block ends this variant's process only."""
        try:
            yield
        except (UnsupportedError, ReplicateError) as error:
            self.errors[variant.index] = error
            self._started.pop(variant.index, None)
            self._ends[variant.index].close()


def _looks_first(variant: Variant) -> bool:
    """Whether a first process shows a rough figure before it warms up. On a GPU memory is known only afterwards."""
    decodes = variant.workload.task is Task.DECODING
    return decodes and variant.device is DeviceKind.CPU and _has_short(variant)


def _has_short(variant: Variant) -> bool:
    """Whether a request can be short: one that compiles would compile anew, and a load has many requests."""
    return not (variant.compiles or variant.workload.is_served)
