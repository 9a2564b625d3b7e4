"""Rounds and turns: how many a process measures beside other work, and nobody computes in those of others."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import pytest
from hypothesis import strategies as st

from optigpu.child.messages import Assignment, Ready
from optigpu.conductor.processes import rounds
from optigpu.conductor.processes.child import Child, ask
from optigpu.conductor.processes.confinement import child_variables
from optigpu.conductor.processes.residents import Residents
from optigpu.conductor.processes.rounds import (
    LONGEST_REST_S,
    PATIENCE,
    ROUND_S,
    Replicate,
    TimedRounds,
    rest_of,
)
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.verdicts.disturbance import Goal, Selection, Yardstick
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostReading, HostSample
from optigpu.hardware.counters import cpu_clock_s, needs_cpu
from optigpu.hardware.probe import probe
from optigpu.job.plan import variants_of
from optigpu.vocabulary import DeviceKind, ReplicateError
from tests.engine.processes import program
from tests.engine.sessions import session_with, small_job

pytestmark = pytest.mark.slow

QUIET = HostSample(wall_s=ROUND_S, cpus=2, foreign_s=0.0, idle_s=0.1, steal_s=0.0)
BUSY = HostSample(wall_s=ROUND_S, cpus=2, foreign_s=ROUND_S / 2, idle_s=0.1, steal_s=0.0)
MIN_S, MAX_S = 4.0, 20.0


class Scripted(HostMonitor):
    """Shows what it is told, round by round."""

    def __init__(self, host_samples: Iterable[HostSample]) -> None:
        super().__init__(DeviceKind.CPU, probe(), set)
        self._script = iter(host_samples)
        self.fastest_probe_s = None

    def between(self, before: HostReading, after: HostReading) -> HostSample:
        """The next of the script."""
        return next(self._script)


@contextmanager
def rounds_beside(folder: Path, host_samples: Iterable[HostSample], **measure: float) -> Iterator[Replicate]:
    """The rounds of a process that answers at once: a round counts for as long as it was to take."""
    spec = small_job(plan="single", measure={"min_seconds": MIN_S, "max_seconds": MAX_S, **measure})
    (variant,) = variants_of(spec)
    assignment = Assignment(
        variant=variant, environment=probe(), measure=spec.measure, seed=0, replicate=0, folder=str(folder)
    )
    progress = JobProgress(lambda _: None, lambda: None, [0], 1)
    with Child(program("well_behaved"), child_variables(1)) as child:
        ready = ask(child, assignment, Ready, progress)
        timed = TimedRounds(child, ready, assignment, Scripted(host_samples))
        while not timed.are_over:
            timed.measure_one(progress)
        yield timed.replicate()


def selected(replicate: Replicate) -> Selection:
    return replicate.selection(Yardstick(DeviceKind.CPU), Goal(MIN_S, 6))


def test_a_quiet_machine_costs_the_least_time_alone(tmp_path: Path) -> None:
    with rounds_beside(tmp_path, repeat(QUIET)) as replicate:
        assert len(replicate.rounds) == MIN_S / ROUND_S
        assert replicate.settled


def test_disturbed_rounds_are_measured_again(tmp_path: Path) -> None:
    with rounds_beside(tmp_path, chain([QUIET, *[BUSY] * 5], repeat(QUIET))) as replicate:
        assert len(replicate.rounds) == MIN_S / ROUND_S + 5
        selection = selected(replicate)
    assert not selection.is_disturbed
    assert [record.counted for record in selection.records[:7]] == [True, *[False] * 5, True]
    assert len(replicate.samples["tokens_per_s"]) == sum(replicate.rounds), "what is set aside is kept"


def test_a_load_that_stays_costs_no_more_than_patience(tmp_path: Path) -> None:
    with rounds_beside(tmp_path, repeat(BUSY)) as replicate:
        assert len(replicate.rounds) == pytest.approx(PATIENCE * MIN_S / ROUND_S, abs=1)
        assert selected(replicate).is_disturbed
        assert replicate.settled, "by all rounds"


def test_a_job_s_time_is_its_time_whatever_happens(tmp_path: Path) -> None:
    script = (QUIET if number % 3 == 0 else BUSY for number in range(1000))
    with rounds_beside(tmp_path, script, max_seconds=10.0) as replicate:
        assert len(replicate.rounds) <= 10.0 / ROUND_S
        assert not selected(replicate).is_disturbed, "half of the least time is enough"


def test_a_process_that_gives_more_requests_than_it_was_asked_for_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples would fill the conductor's memory, and the database."""
    monkeypatch.setattr(rounds, "MOST_REQUESTS", 10)
    words = "A round gave 20 requests, and at most 10 were asked for"
    with pytest.raises(ReplicateError, match=words), rounds_beside(tmp_path, [QUIET]):
        pass


MEASURE = {"replicates": 1, "min_seconds": 1.0, "max_seconds": 4.0, "meters": ["latency"]}
counts = st.lists(st.integers(1, 30), min_size=1, max_size=8)


job = partial(small_job, measure=MEASURE)


def test_a_lap_is_one_round_of_each_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    plain = TimedRounds.take_turn

    def noted(self: TimedRounds, progress: JobProgress) -> None:
        order.append(self._assignment.variant.index)
        plain(self, progress)

    monkeypatch.setattr(TimedRounds, "take_turn", noted)
    spec = job("bf16")
    session, _ = session_with(spec, tmp_path, "well_behaved")
    found = Residents(session, 0).measure(variants_of(spec)).replicates
    first, second = found[0], found[1]
    laps = min(len(first.rounds), len(second.rounds))
    assert laps >= 4
    for lap in range(laps):
        assert first.host_samples[lap] is second.host_samples[lap], "what disturbs a lap disturbs both"
        assert len(first.turns[lap]) == len(second.turns[lap]) > 1
    for each in (first, second):
        assert [sum(part) for part in each.turns[:laps]] == list(each.rounds[:laps])
        assert all(lasted >= 0.25 - 1e-9 for lasted in each.seconds[:laps]), (
            "a quarter of the least time each"
        )
        assert len(each.samples["latency_s"]) == sum(each.rounds)
    taken = len(first.turns[0])
    assert order[: 2 * taken] == [0, 1] * taken
    assert order[2 * taken : 4 * taken] == [1, 0] * taken, "each comes first in every other lap"


def test_of_single_processes_who_has_enough_goes_on_with_a_quarter_of_the_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(self: TimedRounds) -> None:
        self._is_settled = len(self._ended) >= 4 + 2 * self._assignment.variant.index

    monkeypatch.setattr(TimedRounds, "_check", settle)
    monkeypatch.setattr(rounds, "rest_of", lambda _: 0.0)
    spec = job("bf16")
    session, _ = session_with(spec, tmp_path, "well_behaved")
    first, second = Residents(session, 0).measure(variants_of(spec)).replicates.values()
    assert [len(turns) for turns in first.turns[4:]] == [5, 5]
    assert [len(turns) for turns in second.turns[4:]] == [20, 20]


def test_one_that_dies_in_a_turn_leaves_the_others_theirs(tmp_path: Path) -> None:
    spec = job("bf16")
    session, _ = session_with(spec, tmp_path, "mortal", 7)
    turn = Residents(session, 0).measure(variants_of(spec))
    assert {index: type(error) for index, error in turn.errors.items()} == {1: ReplicateError}
    survivor = turn.replicates[0]
    assert [sum(part) for part in survivor.turns if part] == [
        count for part, count in zip(survivor.turns, survivor.rounds, strict=True) if part
    ]
    assert len(survivor.turns[0]) > 1
    assert survivor.turns[-1] == (), "the last rounds are measured alone"


def restless(folder: Path, seconds: float) -> dict[int, Replicate]:
    """Two variants side by side, of which the second one computes for so long after its turns began."""
    spec = job("bf16")
    session, _ = session_with(spec, folder, "restless", seconds)
    return Residents(session, 0).measure(variants_of(spec)).replicates


def test_who_computes_after_its_turn_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "LONGEST_REST_S", 60.0)  # until it rests, on a busy machine too
    calm, other = restless(tmp_path, 0.1).values()
    assert all(pause.rested for pause in other.pauses if pause.wall_s)
    assert sum(pause.used_s for pause in other.pauses) < 0.05 * sum(pause.wall_s for pause in other.pauses)
    # A turn is long beside the rest that it needs: it has fewer from the second lap on.
    assert len(other.turns[1]) < len(other.turns[0]) == len(calm.turns[0])


@pytest.mark.long
def test_who_never_rests_is_not_waited_for_without_end_and_its_work_is_counted(tmp_path: Path) -> None:
    _, other = restless(tmp_path, 60.0).values()
    paused = [pause for pause in other.pauses if pause.wall_s]
    # A look at its threads, one after the other, may miss which of them is at work.
    assert sum(pause.rested for pause in paused) <= 1 < len(paused)
    assert all(pause.used_s > 0 for pause in paused)


def test_a_process_is_at_rest_when_no_thread_needs_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "LOOK_S", 0.005)
    script = "import time; end = time.process_time() + 0.1\nwhile time.process_time() < end: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        while rest_of(process.pid) >= LONGEST_REST_S:
            pass
        before = cpu_clock_s(process.pid)
        assert before is not None
        assert before > 0.1
        assert not needs_cpu(process.pid)
        process.communicate(b"\n")
    assert not needs_cpu(process.pid)
    assert cpu_clock_s(process.pid) is None
    assert rest_of(process.pid) < LONGEST_REST_S
