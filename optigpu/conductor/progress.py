"""A job's progress and its limits, how long its parts take (guessed at first, then as measured), and where its time
went."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from optigpu.child.messages import KEPT_WORK
from optigpu.documents.events import Event, Progressed, Span
from optigpu.job.estimate import MAKE, SAMPLE, START, Guess, Plan
from optigpu.job.spec import Measure
from optigpu.vocabulary import CancelledError, DeadlineError, OverdueError

Unit = tuple[int, int]
"""A replicate of a variant: the variant's index and the replicate's number."""


LONGER = 1.2
"""How many times as long as it took by then sampling is expected to take that has overrun what was expected."""


class Pace:
    """What is left of each replicate, and how long that is expected to take.

    A part of a replicate is expected to take as long as in the same variant's replicate before, or as guessed, times
    the factor by which that part of other variants in this replicate differed from what was expected of it. Guesses
    are taken to be wrong all alike; of what was measured before, only the known share of the variants is.
    """

    def __init__(self, guesses: Mapping[int, Guess], replicates: int) -> None:
        self._guesses, self._replicates = dict(guesses), replicates
        self.left = {
            (index, number): dict.fromkeys(guess.parts(number))
            for index, guess in guesses.items()
            for number in range(replicates)
        }
        # What each part took, in seconds: by its name and the replicate's number, then by the variant's index.
        self.took: dict[tuple[str, int], dict[int, float]] = {}
        self._expected: dict[tuple[str, int], dict[int, float]] = {}
        # How long a replicate that is being sampled has been, and what a part took by now that goes on later.
        self._sampled: dict[Unit, float] = {}
        self._begun: dict[tuple[Unit, str], float] = {}
        for part in {part for guess in guesses.values() for part in guess.seconds}:
            self._expect(part)

    @property
    def is_measured(self) -> bool:
        """Whether all guesses are of earlier runs."""
        return all(guess.measured for guess in self._guesses.values())

    def slow_down(self, factor: float) -> None:
        """All parts are expected to take so many times as long as they were guessed."""
        self._guesses = {index: guess.times(factor) for index, guess in self._guesses.items()}
        for part in {part for guess in self._guesses.values() for part in guess.seconds}:
            self._expect(part)

    def add(self, unit: Unit) -> None:
        """One more replicate of a variant, as long as its last one."""
        index, number = unit
        if unit not in self.left and index in self._guesses:
            self.left[unit] = dict.fromkeys(self._guesses[index].parts(number))
            self._replicates = max(self._replicates, number + 1)
            for part in self.left[unit]:
                self._expect(part)

    def take(self, unit: Unit, part: str, seconds: float, *, ends: bool = True) -> None:
        """The part took so many seconds, and as many more as it took before if it had not ended."""
        seconds += self._begun.pop((unit, part), 0.0)
        if not ends:
            self._begun[unit, part] = seconds
            return
        self.left.get(unit, {}).pop(part, None)
        self._learn(unit, part, seconds)

    def made(self, unit: Unit, seconds: float, *, ends: bool) -> None:
        """In so much of the replicate's start it made what its later ones find; if it `ends`, nothing else."""
        if MAKE not in self.left.get(unit, {}):
            return
        if START in self.left[unit]:
            self._begun[unit, START] = self._begun.get((unit, START), 0.0) - seconds
        else:
            self._learn(unit, START, max(0.0, self.expected_s(unit, START) - seconds))
        self.take(unit, MAKE, seconds, ends=ends)

    def sample(self, unit: Unit, seconds: float) -> None:
        self._sampled[unit] = self._sampled.get(unit, 0.0) + seconds

    def sample_on(self, unit: Unit, seconds: float) -> None:
        """A round of so many seconds begins. What overran is expected to go on by a share of its time."""
        least_s = self._sampled.get(unit, 0.0) + seconds
        if least_s > self.expected_s(unit, SAMPLE):
            self._learn(unit, SAMPLE, LONGER * least_s)

    def end_sampling(self, unit: Unit) -> None:
        if SAMPLE in self.left.get(unit, {}):
            self.take(unit, SAMPLE, self._sampled.get(unit, 0.0))

    def expected_s(self, unit: Unit, part: str) -> float:
        index, number = unit
        return self._expected.get((part, number), {}).get(index, 0.0)

    def part_left_s(self, unit: Unit, part: str, most_sample_s: float) -> float:
        """How long the part still takes, if it is not done. A replicate is sampled for `most_sample_s` at most."""
        if part not in self.left.get(unit, {}):
            return 0.0
        expected_s = self.expected_s(unit, part)
        if part != SAMPLE:
            return max(0.0, expected_s - self._begun.get((unit, part), 0.0))
        return max(0.0, min(expected_s, most_sample_s) - self._sampled.get(unit, 0.0))

    def left_s(self, most_sample_s: float, units: Iterable[Unit] | None = None) -> float:
        """How long these replicates, or all, still take."""
        chosen = self.left if units is None else [unit for unit in units if unit in self.left]
        return sum(self.part_left_s(unit, part, most_sample_s) for unit in chosen for part in self.left[unit])

    def _learn(self, unit: Unit, part: str, seconds: float) -> None:
        index, number = unit
        self.took.setdefault((part, number), {})[index] = seconds
        self._expect(part)

    def _expect(self, part: str) -> None:
        """Works out again what is expected of a part, replicate by replicate.

        In the first ones short parts say little of long ones: 20 s instead of 2 for one variant do not make another's
        90 s 900.
        """
        expected = {index: guess.seconds.get(part, 0.0) for index, guess in self._guesses.items()}
        for number in range(self._replicates):
            took = self.took.get((part, number), {})
            known = {index for index in took if index in expected} if number == 0 else set(expected)
            foreseen_s = sum(expected[index] for index in known)
            took_s = sum(took.get(index, expected[index]) for index in known)
            expected = {
                index: took.get(index, _scaled(seconds, took_s, foreseen_s, seconds if number == 0 else 0.0))
                for index, seconds in expected.items()
            }
            self._expected[part, number] = expected


def _scaled(seconds: float, took_s: float, foreseen_s: float, believed_s: float) -> float:
    """Seconds times what was taken over what was foreseen, as if `believed_s` more had been as foreseen."""
    return seconds * (took_s + believed_s) / (foreseen_s + believed_s) if foreseen_s else seconds


CpuClocks = Callable[[], Mapping[int, float]]
"""Reads the CPU seconds that each of a job's processes has used, by its id."""


class Timeline:
    """Where a job's time goes: whatever a process or the job does is followed by what comes next, without a gap.

    What a replicate does several times, as in its turns, is one span.
    """

    def __init__(self, began_s: float, doing: str) -> None:
        self.cpu_clocks: CpuClocks = dict
        self._began_s = began_s
        # When each began, its wall-clock seconds and its CPU seconds.
        self._spans: dict[tuple[int | None, int, str], tuple[float, float, float]] = {}
        self._now: tuple[int | None, int, str] = (None, 0, doing)
        self._since = began_s
        self._used: Mapping[int, float] = {}

    def turn_to(self, index: int | None, replicate: int, doing: str, at_s: float) -> None:
        """What was done until now ends, and something else begins."""
        used = self.cpu_clocks()
        cpu_s = sum(seconds - self._used.get(pid, 0.0) for pid, seconds in used.items())
        began_s, wall_s, earlier_s = self._spans.get(self._now, (self._since - self._began_s, 0.0, 0.0))
        self._spans[self._now] = (began_s, wall_s + at_s - self._since, earlier_s + cpu_s)
        self._now, self._since, self._used = (index, replicate, doing), at_s, used

    def spans(self, at_s: float) -> tuple[Span, ...]:
        """All spans until now, in the order in which they began."""
        self.turn_to(*self._now, at_s)
        return tuple(
            Span(index=index, replicate=replicate, doing=doing, began_s=began_s, seconds=seconds, cpu_s=cpu_s)
            for (index, replicate, doing), (began_s, seconds, cpu_s) in self._spans.items()
        )


PROGRESS_PERIOD_S = 1.0
MOST_SHARE = 0.99
"""Of a round while something of it is left."""
MOST_RISE, SHORT_S = 4 / 3, 5.0
"""How many times longer the time left may become at once, where it is not as short as this."""
WAITING_FOR_DEVICE = "waiting for the device"
ENDING = "ending"
"""In a timeline: a process has been measured, and ends."""
NO_GUESSES: Mapping[int, Guess] = MappingProxyType({})


class JobProgress:
    """Follows a job's replicates part by part, predicts how long they still take, and checks the job's limits. For each
    replicate: `begin` (again and again where several take turns), `advance` around each of its parts, `end`."""

    def __init__(
        self,
        on_event: Callable[[Event], None],
        cancelled: Callable[[], str | None],
        indexes: Collection[int],
        replicates: int,
        *,
        guesses: Mapping[int, Guess] = NO_GUESSES,
        measure: Measure | None = None,
        prepare_s: float = 0.0,
    ) -> None:
        """`indexes` are those of the variants that will be measured, `guesses` how long their parts take, if known, and
        `prepare_s` how long `for_the_job` does."""
        self._on_event, self._cancelled = on_event, cancelled
        self._pace = Pace({index: guesses.get(index, Guess()) for index in indexes}, replicates)
        self._measure = measure or Measure()
        self._most_sample_s, self._prepare_s = self._measure.max_seconds, prepare_s
        self._timeout_s, self._deadline = math.inf, math.inf
        self._half = (math.inf, "")
        self._unit: Unit = (next(iter(indexes), 0), 0)
        self._doing, self._showed = WAITING_FOR_DEVICE, time.monotonic()
        # How long each replicate has made what is kept on disk, and whose work was shown last.
        self._made_s: dict[Unit, float] = {}
        self._made_by = self._unit
        self._started, self._told = time.monotonic(), -math.inf
        self._of_the_job = True
        self.timeline = Timeline(self._started, self._doing)
        # Which round of how many is measured: more than one in a search.
        self._round, self._rounds = 0, 1
        # When the present part began, how long it takes, and all that was left then.
        self._began, self._part_s, self._left_s = self._started, 0.0, 0.0
        # The share of the round that is done, the time left that was told last, and the most that it may be now.
        self._share, self._told_left_s, self._most_left_s = 0.0, math.inf, math.inf
        self._between()

    def limit(self, timeout_s: float) -> None:
        self._started = time.monotonic()
        self._timeout_s, self._deadline = timeout_s, self._started + timeout_s

    def slow_down(self, factor: float) -> None:
        """The job is expected to take so many times as long as was foreseen."""
        self._prepare_s *= factor
        self._pace.slow_down(factor)
        self._between()

    def begin_round(self, number: int, count: int, plan: Plan, ready: Collection[int]) -> None:
        """What is measured from now on is round `number` of `count`, and a share of the job's progress. The processes
        of the variants in `ready` need not start."""
        self._measure = plan.spec.measure
        self._most_sample_s = self._measure.max_seconds
        self._pace = Pace(plan.guesses, plan.replicates)
        for index in ready:
            for part in (START, MAKE):
                self._pace.left.get((index, 0), {}).pop(part, None)
        self._round, self._rounds, self._share = number, count, 0.0
        self._between()

    @contextmanager
    def half_of_the_time_left(self, what: str) -> Iterator[None]:
        """Allows `what` half of the time that the job has left, so that a process that hangs costs the others less."""
        self._half = (time.monotonic() + self.time_left_s / 2, what)
        try:
            yield
        finally:
            self._half = (math.inf, "")

    def begin(self, index: int, replicate: int, doing: str) -> None:
        """Work on this replicate starts or continues; reported at once."""
        self._unit, self._of_the_job = (index, replicate), False
        self._pace.add(self._unit)
        self._between()
        self.show(doing)

    def turn_to(self, index: int, replicate: int) -> None:
        self._unit = (index, replicate)
        self._turn(self._doing)

    def show(self, doing: str, span: str = "") -> None:
        """Sets the text for what the current replicate does; reported at once, but what follows a colon, which says how
        far it is, once a second. `span` is what the timeline calls it, if not the text before a colon."""
        (thing, _, how_far), before = doing.partition(": "), self._doing.partition(": ")[0]
        self._count_made()
        self._doing, self._made_by = doing, self._unit
        if not how_far or thing != before:
            self._turn(span or doing)
            self._tell()

    @contextmanager
    def for_the_job(self, doing: str) -> Iterator[None]:
        """What the block does is done for all variants."""
        self._of_the_job, self._began, self._part_s = True, time.monotonic(), self._prepare_s
        try:
            self.show(doing)
            yield
        finally:
            self._of_the_job, self._prepare_s = False, 0.0
            self._between()

    @property
    def took(self) -> dict[tuple[int, str], float]:
        """The seconds of each part of a variant's first process, by the variant's index."""
        parts = self._pace.took.items()
        return {
            (index, part): seconds
            for (part, number), by_index in parts
            for index, seconds in by_index.items()
            if number == 0
        }

    def spans(self) -> tuple[Span, ...]:
        """Where the time went until now."""
        return self.timeline.spans(time.monotonic())

    def _turn(self, doing: str) -> None:
        index, replicate = (None, 0) if self._of_the_job else self._unit
        self.timeline.turn_to(index, replicate, doing.partition(": ")[0], time.monotonic())

    @contextmanager
    def advance(self, part: str, seconds: float = 0.0, *, ends: bool = True) -> Iterator[None]:
        """The block is a part of the present replicate, if nothing is raised; of SAMPLE, a round of about `seconds`. A
        part `ends` with its last block."""
        if part == SAMPLE:
            self._pace.sample_on(self._unit, seconds)
        self._between()
        parts = (START, MAKE) if part == START else (part,)
        self._part_s = sum(self._pace.part_left_s(self._unit, each, self._most_sample_s) for each in parts)
        try:
            yield
            took_s = time.monotonic() - self._began
            if part == SAMPLE:
                self._pace.sample(self._unit, took_s)
            else:
                self._pace.take(self._unit, part, took_s, ends=ends)
        finally:
            self._between()

    def _count_made(self) -> None:
        since, self._showed = self._showed, time.monotonic()
        if self._doing.startswith(KEPT_WORK):
            self._made_s[self._made_by] = self._made_s.get(self._made_by, 0.0) + self._showed - since

    def loaded(self, *, compiles: bool) -> None:
        """The process has its model; what it made of it so far later ones find."""
        self._count_made()
        self._pace.made(self._unit, self._made_s.pop(self._unit, 0.0), ends=not compiles)
        self._between()

    def ready(self, compiling_s: float | None) -> None:
        """The process is ready, and compiled for so long; None: it compiled nothing."""
        self._pace.made(self._unit, (compiling_s or 0.0) + self._made_s.pop(self._unit, 0.0), ends=True)
        self._between()

    def end_rounds(self) -> None:
        """No round of the present replicate follows."""
        self._pace.end_sampling(self._unit)
        self._between()

    def end(self) -> None:
        self.leave_out([self._unit])
        self.show("done", ENDING)

    def give_up(self, index: int) -> None:
        """The variant has failed: its remaining replicates are not measured."""
        self.leave_out([unit for unit in self._pace.left if unit[0] == index])
        self.show("given up", ENDING)

    def leave_out(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._pace.left.pop(unit, None)
        self._between()

    def expect(self, unit: Unit) -> None:
        self._pace.add(unit)
        self._between()

    @property
    def time_left_s(self) -> float:
        return self._deadline - time.monotonic()

    @property
    def expected_s(self) -> float:
        return self._left_s

    def has_time_for(self, units: Collection[Unit]) -> bool:
        """Whether these replicates are expected to fit into the time that is left, each sampled for its least."""
        return self._pace.left_s(self._measure.min_seconds, units) <= self.time_left_s

    def most_sample_s(self) -> float:
        """How long a replicate that starts now may be sampled so that all that are left fit into the job's time."""
        least, most = self._measure.min_seconds, self._measure.max_seconds
        left_s = self.time_left_s - self._pace.left_s(0.0)
        to_sample = sum(SAMPLE in parts for parts in self._pace.left.values())
        self._most_sample_s = max(least, min(most, left_s / max(to_sample, 1)))
        return self._most_sample_s

    def check(self) -> None:
        """Reports the progress once a second; must be called more often. Raises CancelledError when the job was
        cancelled, DeadlineError when its time is up, and OverdueError when that of the present part is."""
        reason = self._cancelled()
        if reason is not None:
            raise CancelledError(reason)
        if time.monotonic() > self._deadline:
            raise DeadlineError(
                f"The job reached its time limit of {self._timeout_s:g} s; raise limits.timeout_s or measure less."
            )
        if time.monotonic() > self._half[0]:
            raise OverdueError(
                f"{self._half[1]} took half of the time that the job had left; raise limits.timeout_s."
            )
        if time.monotonic() - self._told >= PROGRESS_PERIOD_S:
            self._tell()

    def _between(self) -> None:
        """No part has begun: what is left stays as it is until one does."""
        self._began, self._part_s = time.monotonic(), 0.0
        self._left_s = self._prepare_s + self._pace.left_s(self._most_sample_s)
        self._most_left_s = max(MOST_RISE * self._told_left_s, SHORT_S)

    def _tell(self) -> None:
        since_s, self._told = time.monotonic() - self._told, time.monotonic()
        left_s = self._left_now_s()
        if not self._pace.left:
            self._share = 1.0
        elif self._doing != WAITING_FOR_DEVICE and self._left_s and since_s < math.inf:
            # On from where it is, at the pace that would fill it when nothing is left; a part that takes longer than
            # all that is left is expected to go on for as long as it took.
            pace_s = max(left_s, self._told - self._began)
            self._share += max(0.0, MOST_SHARE - self._share) * since_s / (since_s + pace_s)
        remaining_s = self._told_s(left_s)
        (index, replicate), doing = self._unit, self._doing
        if self._rounds > 1:
            doing, remaining_s = f"round {self._round + 1} of {self._rounds}: {doing}", None
        self._on_event(
            Progressed(
                index=index,
                replicate=replicate,
                doing=doing,
                fraction=(self._round + self._share) / self._rounds,
                remaining_s=remaining_s,
                for_all=self._of_the_job,
            )
        )

    def _left_now_s(self) -> float:
        """What is left, counted down within a part. Of its second half a part has the less left the longer it takes,
        and never nothing: nobody knows when one ends that takes longer than expected."""
        spent_s, part_s = self._told - self._began, self._part_s
        if spent_s > part_s / 2:
            return self._left_s - part_s + part_s**2 / (4 * spent_s)
        return self._left_s - spent_s

    def _told_s(self, left_s: float) -> float | None:
        """The time left as it is told: None until a first process is ready, unless earlier runs tell. A new fact raises
        it by MOST_RISE at most."""
        if not self._pace.left:
            return 0.0
        if not (self._pace.took or self._pace.is_measured):
            return None
        self._told_left_s = min(left_s, self._most_left_s)
        return max(0.0, min(self._told_left_s, self._deadline - self._told))
