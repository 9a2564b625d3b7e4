"""A job's time: what it takes about before it starts, how well the time left is predicted, and when it must stop."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from optigpu.conductor import progress as progress_module
from optigpu.conductor.progress import MOST_RISE, MOST_SHARE, SHORT_S, JobProgress, Pace
from optigpu.documents.events import Event, Progressed
from optigpu.job.estimate import (
    AUDIT,
    IMPORT_S,
    MAKE,
    ROUGH_LOOK_S,
    ROUGH_QUALITY_S,
    SAMPLE,
    START,
    Guess,
    Plan,
    plan_time,
    spoken,
)
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Measure
from optigpu.vocabulary import DeadlineError, OverdueError, SpecError


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_module, "time", made)
    return made


@pytest.fixture
def heard() -> list[Progressed]:
    return []


GUESS = Guess({START: 10.0, SAMPLE: 20.0, AUDIT: 2.0, "quality": 8.0}, once=frozenset({"quality"}))


@pytest.fixture
def progress(clock: Clock, heard: list[Progressed]) -> JobProgress:
    """Of a job with two variants, two replicates each."""

    def listen(event: Event) -> None:
        assert isinstance(event, Progressed)
        heard.append(event)

    guesses = {0: GUESS, 1: GUESS}
    return JobProgress(listen, lambda: None, [0, 1], replicates=2, guesses=guesses)


def start(progress: JobProgress, clock: Clock, index: int, replicate: int, seconds: float) -> None:
    progress.begin(index, replicate, "starting")
    with progress.advance(START):
        clock.now += seconds


def test_the_remaining_time_ends_with_the_job_s_limit(
    progress: JobProgress, clock: Clock, heard: list[Progressed]
) -> None:
    progress.limit(15)
    start(progress, clock, 0, 0, 10)
    progress.show("ready")
    assert heard[-1].remaining_s == 5


def test_the_time_that_is_left_is_shared_by_the_processes(progress: JobProgress, clock: Clock) -> None:
    assert progress.most_sample_s() == 120, "no limit yet"
    progress.limit(4 * 12 + 2 * 8 + 4 * 30)
    assert progress.most_sample_s() == pytest.approx(30)
    clock.now += 1000
    assert progress.most_sample_s() == 5, "what was asked for at least"


@dataclass(frozen=True)
class Speed:
    """How long the parts of a variant's replicates really take, in seconds.

    `compile` is part of the first start, and where nothing is kept on disk (`afresh`) of every one.
    """

    start: float = 6.0
    sample: float = 10.0
    audit: float = 1.0
    meters: Mapping[str, float] = field(default_factory=dict)
    compile: float = 0.0
    afresh: bool = False


class Simulation:
    """A ladder as the conductor measures it: started one by one, sampled in turns, then checked one by one."""

    def __init__(
        self, clock: Clock, speeds: list[Speed], replicates: int, *, jitter: float = 0.1, resident: int = 8
    ) -> None:
        self.clock, self.speeds, self.replicates, self.resident = clock, speeds, replicates, resident
        self._rng, self._jitter = random.Random(1), jitter
        self.ticks: list[tuple[float, float, float | None]] = []
        # Each time at which something became known: a part ended, or a round more was needed.
        self.facts: list[float] = []
        # When each replicate of the first group, then of the next, was whole.
        self.ends: list[float] = []
        meters = dict.fromkeys({name for speed in speeds for name in speed.meters}, 2.0)
        parts = {START: 6.0, MAKE: 40.0, SAMPLE: 24.5, AUDIT: 1.0}
        guesses = {
            index: Guess(
                {part: seconds for part, seconds in parts.items() if part != MAKE or speed.compile} | meters,
                once=frozenset([MAKE, *meters]),
            )
            for index, speed in enumerate(speeds)
        }
        self.progress = JobProgress(
            self._listen,
            lambda: None,
            range(len(speeds)),
            replicates,
            guesses=guesses,
            measure=Measure(),
        )

    def run(self) -> None:
        self.progress.limit(86400)
        waiting = list(range(len(self.speeds)))
        while waiting:
            group, waiting = waiting[: self.resident], waiting[self.resident :]
            for number in range(self.replicates):
                self._replicate(group, number)
                self.ends.append(self.clock.now)

    def _replicate(self, group: list[int], number: int) -> None:
        for index in group:
            self.progress.begin(index, number, "starting")
            speed = self.speeds[index]
            compile_s = speed.compile if number == 0 or speed.afresh else 0.0
            self._part(START, self._varied(speed.start) + compile_s)
            self.progress.ready(compile_s or None)
        spent = dict.fromkeys(group, 0.0)
        while active := [index for index in group if spent[index] < self.speeds[index].sample]:
            for index in active:
                self.progress.begin(index, number, "measuring")
                seconds = max(1.25, spent[index] / 2) if spent[index] >= 5 else 1.25
                self._part(SAMPLE, self._varied(seconds), seconds)
                spent[index] += seconds
                if spent[index] >= self.speeds[index].sample:
                    self.progress.end_rounds()
        for index in group:
            self.progress.begin(index, number, "checking")
            self._part(AUDIT, self._varied(self.speeds[index].audit))
            for meter, seconds in self.speeds[index].meters.items() if number == 0 else ():
                self._part(meter, self._varied(seconds))
            self.progress.end()

    def _varied(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1 - self._jitter, 1 + self._jitter)

    def _part(self, part: str, seconds: float, known: float = 0.0) -> None:
        self.facts.append(self.clock.now)
        with self.progress.advance(part, known):
            end = self.clock.now + seconds
            while self.clock.now < end:
                self.clock.now = min(end, self.clock.now + 0.25)
                self.progress.check()
        self.facts.append(self.clock.now)

    def _listen(self, event: Event) -> None:
        assert isinstance(event, Progressed)
        self.ticks.append((self.clock.now, event.fraction, event.remaining_s))


LADDERS: Mapping[str, list[Speed]] = {
    "alike": [Speed()] * 5,
    "very different": [Speed(sample=5), Speed(sample=60), Speed(sample=5, start=20), Speed(sample=110)],
    "compiled": [Speed(), Speed(compile=70), Speed(compile=90), Speed(start=8), Speed(compile=15)],
    "compiled afresh": [Speed(), Speed(compile=60, afresh=True), Speed(compile=90, afresh=True), Speed()],
    "long meters": [Speed(meters={"quality": 20.0}, sample=5), Speed(meters={"quality": 15.0}, sample=8)],
    "slow to load": [Speed(start=120, sample=6), Speed(start=60, sample=6), Speed(start=40, sample=20)],
    "two groups": [Speed(sample=seconds) for seconds in (5, 30, 8, 50, 12, 20, 6, 40, 25, 30, 12)],
}


@pytest.mark.parametrize("replicates", [2, 5])
@pytest.mark.parametrize("ladder", LADDERS)
def test_the_time_left_is_right_from_half_way_on(clock: Clock, ladder: str, replicates: int) -> None:
    """Within 30% of the truth; where less than a tenth of the job is left, of that tenth.

    Where the first replicate is more than half of the job, from its end on: before that nobody knows how long variants
    are sampled. That nothing compiled is kept on disk is known after the second.
    """
    simulation = Simulation(clock, LADDERS[ladder], replicates)
    simulation.run()
    began, end = 100.0, clock.now
    known = simulation.ends[1 if ladder == "compiled afresh" else 0]
    ticks = [tick for tick in simulation.ticks if tick[0] >= max(known, (began + end) / 2)]
    wrong = []
    for now, _, left_s in ticks:
        truth = end - now
        assert left_s is not None
        if abs(left_s - truth) > 0.3 * max(truth, 0.1 * (end - began)):
            wrong.append((round(now - began, 1), round(truth, 1), round(left_s, 1)))
    assert not wrong, f"{len(wrong)} of {len(ticks)}, of {end - began:.0f} s: {wrong[:5]}"


@pytest.mark.parametrize("ladder", LADDERS)
def test_the_time_left_grows_by_a_third_at_most_and_only_with_a_new_fact(clock: Clock, ladder: str) -> None:
    simulation = Simulation(clock, LADDERS[ladder], 3, jitter=0.3)
    simulation.run()
    fractions = [fraction for _, fraction, _ in simulation.ticks]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    grew = [
        (before, after)
        for (then, _, before), (now, _, after) in zip(simulation.ticks, simulation.ticks[1:], strict=False)
        if before is not None
        and after is not None
        and after > before + 1e-6
        and not any(then <= fact <= now for fact in simulation.facts)
    ]
    assert grew == []
    told = [left for _, _, left in simulation.ticks if left is not None]
    assert all(after <= max(MOST_RISE * before, SHORT_S) for before, after in pairwise(told))


def test_the_time_limit_counts_from_when_it_is_set(progress: JobProgress, clock: Clock) -> None:
    clock.now += 1000
    progress.check()
    progress.limit(60)
    clock.now += 59
    progress.check()
    clock.now += 2
    with pytest.raises(DeadlineError, match="The job reached its time limit of 60 s"):
        progress.check()


def test_one_part_may_be_given_half_of_the_time_that_is_left(progress: JobProgress, clock: Clock) -> None:
    progress.limit(100)
    clock.now += 20
    with progress.half_of_the_time_left("Making a process ready"):
        clock.now += 39
        progress.check()
        clock.now += 2
        with pytest.raises(OverdueError, match="Making a process ready took half of the time"):
            progress.check()
    progress.check()


def test_what_earlier_runs_took_tells_the_time_left_from_the_start(
    clock: Clock, heard: list[Progressed]
) -> None:
    def listen(event: Event) -> None:
        assert isinstance(event, Progressed)
        heard.append(event)

    for guess in (GUESS, replace(GUESS, measured=True)):
        progress = JobProgress(listen, lambda: None, [0], replicates=1, guesses={0: guess})
        progress.begin(0, 0, "starting")
        with progress.advance(START):
            clock.now += 4
            progress.show("applying")
    assert [event.remaining_s for event in heard[1::2]] == [None, 36.0]
    assert heard[-1].fraction == pytest.approx(MOST_SHARE * 4 / 40)


def test_a_short_part_of_one_variant_says_little_of_a_long_one_of_another() -> None:
    pace = Pace({0: Guess({START: 2.0}), 1: Guess({START: 90.0})}, replicates=1)
    pace.take((0, 0), START, 20.0)
    assert pace.expected_s((1, 0), START) == pytest.approx(90 * 110 / 92)


def test_the_bar_moves_and_something_is_left_however_long_a_part_takes(
    clock: Clock, heard: list[Progressed]
) -> None:
    def listen(event: Event) -> None:
        assert isinstance(event, Progressed)
        heard.append(event)

    guess = Guess({START: 10.0}, measured=True)
    progress = JobProgress(listen, lambda: None, [0], replicates=1, guesses={0: guess}, prepare_s=5.0)
    with progress.for_the_job("preparing"):
        for _ in range(40):
            clock.now += 1
            progress.check()
    progress.begin(0, 0, "starting")
    with progress.advance(START):
        for _ in range(100):
            clock.now += 1
            progress.check()
    fractions = [event.fraction for event in heard]
    assert fractions == sorted(fractions)
    assert len(set(fractions)) > 140, "each second has its own"
    left = [event.remaining_s or 0.0 for event in heard]
    assert left[0] == 15.0
    assert min(left) > 0
    assert all(after <= before for before, after in pairwise(left))


def test_how_far_something_is_comes_once_a_second_and_is_one_span(
    progress: JobProgress, clock: Clock, heard: list[Progressed]
) -> None:
    progress.begin(0, 0, "starting")
    for layer in range(100):
        progress.show(f"applying: packing layer {layer}")
        clock.now += 0.1
        progress.check()
    assert len(heard) < 15
    assert heard[-1].doing.startswith("applying: packing layer 9")
    assert [span.doing for span in progress.spans() if span.seconds] == ["applying"]


def test_the_rounds_of_a_search_share_the_progress(
    progress: JobProgress, clock: Clock, heard: list[Progressed]
) -> None:
    spec = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "bundled:tiny"})
    progress.limit(1000)
    for number in range(2):
        progress.begin_round(number, 2, Plan(spec, {0: GUESS}, replicates=1), ready={0} if number else ())
        assert progress.expected_s == pytest.approx(30.0 if number else 40.0), (
            "a process that is there needs no start"
        )
        if not number:
            start(progress, clock, 0, 0, 10)
        progress.begin(0, 0, "checking")
        with progress.advance(AUDIT):
            clock.now += 2
        progress.end()
        assert (heard[-1].fraction, heard[-1].remaining_s) == ((number + 1) / 2, None)
    assert [each.doing for each in heard][-1] == "round 2 of 2: done"
    assert [(span.doing, span.seconds) for span in progress.spans() if span.seconds] == [
        ("starting", 10),
        ("checking", 4),
    ]
    assert progress.time_left_s == 1000 - 14


def plan(**changes: Any) -> Plan:
    """Of a ladder of four variants."""
    document = {
        "workload": {"kind": "generate"},
        "model": "bundled:tiny",
        "plan": "ladder",
        "stack": [{"name": "bf16"}, {"name": "torch_compile"}],
    }
    spec = JobSpec.model_validate(document | changes)
    return plan_time(spec, variants_of(spec))


def measure(**changes: Any) -> dict[str, Any]:
    return {"min_seconds": 10, "max_seconds": 10, "meters": ["latency"]} | changes


def test_the_time_is_that_of_every_part_of_every_process() -> None:
    made = plan(measure=measure(meters=["latency", "quality"]))
    seconds = [made.guesses[index].seconds for index in range(4)]
    assert all(set(each) == {START, MAKE, SAMPLE, AUDIT, "quality"} for each in seconds)
    assert [each[MAKE] > 0 for each in seconds] == [False, False, True, True]
    assert made.processes == 12
    each_s = sum(IMPORT_S + parts[START] + 10 + parts[AUDIT] for parts in seconds)
    once_s = sum(ROUGH_LOOK_S + ROUGH_QUALITY_S + parts["quality"] + parts[MAKE] for parts in seconds)
    assert made.seconds == pytest.approx(3 * each_s + once_s), "quality is read once, and compiled once"


def test_what_cannot_fit_is_refused_with_what_to_change() -> None:
    assert plan(measure=measure(), limits={"timeout_s": 40}).replicates == 1
    with pytest.raises(SpecError) as caught:
        plan(measure=measure(), limits={"timeout_s": 39.9})
    assert str(caught.value) == (
        "limits.timeout_s: 4 variants of at least 10 s each take more than the limit of 39.9 s; raise "
        "limits.timeout_s, lower measure.min_seconds, or measure fewer variants."
    )


def test_replicates_that_cannot_fit_are_left_out_and_said() -> None:
    trimmed = plan(measure=measure(replicates=5), limits={"timeout_s": 125})
    assert trimmed.replicates == 3
    event = trimmed.estimated()
    assert (event.replicates, event.limit_s, event.seconds) == (3, 125, trimmed.seconds)
    assert event.sentence.startswith("4 variants x 3 processes instead of 5, about ")
    assert "What does not fit is left out, replicates first; ask for --replicates 1 (about " in event.sentence
    assert event.sentence.endswith(
        ", lower --max-seconds, raise --timeout, or leave out the longest with --stack: static_kv_cache + "
        f"torch_compile (about {spoken(trimmed.variant_s(2))}) and bf16 + static_kv_cache + torch_compile "
        f"(about {spoken(trimmed.variant_s(3))})."
    )


def test_the_time_is_shared_so_that_all_fit() -> None:
    """Rather three short processes than a single long one."""
    tight = plan(measure=measure(max_seconds=120), limits={"timeout_s": 900})
    assert 10 < tight.most_sample_s < 120
    assert tight.beside_sampling_s + tight.processes * tight.most_sample_s == pytest.approx(900)
    assert f"a process is measured for {spoken(tight.most_sample_s)} at most" in tight.sentence()
    assert plan(measure=measure(max_seconds=120), limits={"timeout_s": 9000}).most_sample_s == 120
