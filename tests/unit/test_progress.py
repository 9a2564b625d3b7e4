"""A job's progress: what its listener hears, and when the job must stop."""

import pytest

from optigpu.conductor import progress as progress_module
from optigpu.conductor.progress import JobProgress
from optigpu.documents.events import Event, Progressed
from optigpu.vocabulary import CancelledError, DeadlineError


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


@pytest.fixture
def progress(clock: Clock, heard: list[Progressed]) -> JobProgress:
    """Of a job with two variants, two replicates each."""

    def listen(event: Event) -> None:
        assert isinstance(event, Progressed)
        heard.append(event)

    return JobProgress(listen, lambda: None, [0, 1], replicates=2)


def test_each_part_of_a_replicate_advances_the_job(progress: JobProgress, heard: list[Progressed]) -> None:
    progress.begin(0, 0, "starting")
    with progress.advance(0.4):
        pass
    progress.show("measuring")
    progress.end()
    assert [(event.doing, event.fraction) for event in heard] == [
        ("starting", 0.0),
        ("measuring", 0.1),
        ("done", 0.25),
    ]
    assert {(event.index, event.replicate) for event in heard} == {(0, 0)}


def test_a_part_that_takes_as_long_as_expected_moves_the_bar_meanwhile(
    progress: JobProgress, clock: Clock, heard: list[Progressed]
) -> None:
    progress.begin(1, 0, "measuring")
    with progress.advance(0.8, seconds=10):
        clock.now += 5
        progress.check()
        clock.now += 100
        progress.check()
    assert [event.fraction for event in heard] == [0.0, pytest.approx(0.1), pytest.approx(0.2, rel=0.02)]
    assert heard[-1].fraction < 0.2, "it is not there yet"


def test_a_part_is_expected_to_take_as_long_as_the_last_one(
    progress: JobProgress, clock: Clock, heard: list[Progressed]
) -> None:
    for index in (0, 1):
        progress.begin(index, 0, "starting")
        with progress.advance(0.4):
            clock.now += 2
            progress.check()
    fractions = [event.fraction for event in heard if event.index == 1]
    assert fractions == [pytest.approx(0.1), pytest.approx(0.2, rel=0.02)]


def test_a_part_that_fails_is_not_counted_as_done(progress: JobProgress, heard: list[Progressed]) -> None:
    progress.begin(0, 0, "starting")
    with pytest.raises(ZeroDivisionError), progress.advance(0.4):
        raise ZeroDivisionError
    progress.begin(1, 0, "starting")
    assert heard[-1].fraction == 0
    assert heard[-1].remaining_s is None


def test_a_variant_that_is_given_up_counts_as_done(progress: JobProgress, heard: list[Progressed]) -> None:
    progress.begin(0, 0, "starting")
    progress.give_up(0)
    assert (heard[-1].doing, heard[-1].fraction) == ("given up", 0.5)


def test_the_remaining_time_follows_from_what_is_done(
    progress: JobProgress, clock: Clock, heard: list[Progressed]
) -> None:
    progress.limit(1000)
    progress.begin(0, 0, "starting")
    assert heard[-1].remaining_s is None
    with progress.advance(1.0):
        clock.now += 10
    progress.end()
    assert heard[-1].remaining_s == pytest.approx(30)
    for unit in ((0, 1), (1, 0), (1, 1)):
        progress.begin(*unit, "starting")
        progress.end()
    assert heard[-1].fraction == 1
    assert heard[-1].remaining_s == 0


def test_the_remaining_time_ends_with_the_job_s_limit(
    progress: JobProgress, clock: Clock, heard: list[Progressed]
) -> None:
    progress.limit(15)
    progress.begin(0, 0, "starting")
    with progress.advance(1.0):
        clock.now += 10
    progress.end()
    assert heard[-1].remaining_s == 5


def test_it_tells_once_a_second(progress: JobProgress, clock: Clock, heard: list[Progressed]) -> None:
    for _ in range(12):
        progress.check()
        clock.now += 0.25
    assert len(heard) == 3


def test_the_time_limit_counts_from_when_it_is_set(progress: JobProgress, clock: Clock) -> None:
    clock.now += 1000
    progress.check()
    progress.limit(60)
    clock.now += 59
    progress.check()
    clock.now += 2
    with pytest.raises(DeadlineError, match="deadline: the job reached its time limit of 60 s"):
        progress.check()


def test_one_part_may_be_given_half_of_the_time_that_is_left(progress: JobProgress, clock: Clock) -> None:
    progress.limit(100)
    clock.now += 20
    with progress.half_of_the_time_left("making a process ready"):
        clock.now += 39
        progress.check()
        clock.now += 2
        with pytest.raises(DeadlineError, match="making a process ready took half of the time"):
            progress.check()
    progress.check()


def test_a_reason_to_cancel_ends_it(clock: Clock) -> None:
    with pytest.raises(CancelledError, match="enough"):
        JobProgress(lambda _: None, lambda: "enough", [0], 1).check()
