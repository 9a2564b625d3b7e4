"""How many rounds a process measures beside what its machine does, which the test hands in."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path

import pytest

from optigpu.child.messages import Assignment, Ready
from optigpu.conductor.processes import rounds
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.rounds import FIRST_ROUNDS, PATIENCE, ROUND_S, Replicate, TimedRounds
from optigpu.conductor.processes.variables import child_variables
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostReading, HostSample
from optigpu.conductor.verdicts.marks import Yardstick
from optigpu.conductor.verdicts.selection import Goal, Selection
from optigpu.hardware.probe import probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import DeviceKind, ReplicateError
from tests.engine.processes import program

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
    document = {
        "workload": {"kind": "generate"},
        "model": "preset:tiny-llama-test",
        "measure": {"min_seconds": MIN_S, "max_seconds": MAX_S, **measure},
    }
    spec = JobSpec.model_validate(document)
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
        assert replicate.width < 0.01


def test_the_least_time_is_several_rounds_however_short_it_is(tmp_path: Path) -> None:
    with rounds_beside(tmp_path, repeat(QUIET), min_seconds=0.01) as replicate:
        assert len(replicate.rounds) == FIRST_ROUNDS


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
        assert replicate.width < 0.01, "the interval is that of all rounds"


def test_a_load_that_rests_often_enough_is_waited_out(tmp_path: Path) -> None:
    script = (QUIET if number % 3 == 0 else BUSY for number in range(1000))
    with rounds_beside(tmp_path, script) as replicate:
        assert len(replicate.rounds) == pytest.approx(3 * MIN_S / ROUND_S, abs=2)
        assert not selected(replicate).is_disturbed


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
