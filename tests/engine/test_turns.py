"""Whose turn it is, how long turns are, and that nobody computes in the turns of others."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optigpu.conductor.processes import rounds
from optigpu.conductor.processes.residents import LAP_S, Residents
from optigpu.conductor.processes.rounds import (
    LONGEST_REST_S,
    ROUND_S,
    TURN_S,
    Replicate,
    TimedRounds,
    in_turns,
    rest_of,
    turns_of,
)
from optigpu.conductor.progress import JobProgress
from optigpu.hardware.counters import cpu_clock_s, needs_cpu
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import ReplicateError
from tests.engine.sessions import session_with

MEASURE = {"replicates": 1, "min_seconds": 1.0, "max_seconds": 4.0, "meters": ["latency"]}
counts = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def job(*stack: str) -> JobSpec:
    document = {"workload": {"kind": "generate"}, "model": "preset:tiny-llama-test", "plan": "grid"}
    return JobSpec.model_validate(
        document | {"stack": [{"name": name} for name in stack], "measure": MEASURE}
    )


@given(counts)
def test_each_has_its_turns_spread_over_the_same_time(given: list[int]) -> None:
    order = list(in_turns(given))
    assert Counter(order) == dict(enumerate(given))
    for place, count in enumerate(given):
        mine = [position for position, whose in enumerate(order) if whose == place]
        between = [after - before for before, after in pairwise(mine)]
        others = sum(given) / count
        assert all(gap <= others + len(given) for gap in between)


def test_equal_ones_take_turns_one_by_one() -> None:
    assert list(in_turns([3, 3])) == [0, 1] * 3
    assert list(in_turns([1, 3])) == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("request_s", "rest_s", "expected"),
    [(0.001, 0.0, ROUND_S / TURN_S), (0.07, 0.0, 6), (0.3, 0.0, 1), (5.0, 0.0, 1), (0.001, 0.2, 1)],
)
def test_a_turn_is_short_and_no_shorter_than_a_request(
    request_s: float, rest_s: float, expected: float
) -> None:
    assert turns_of(ROUND_S, request_s, rest_s) == expected


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


def test_laps_of_many_are_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    plain = TimedRounds.begin

    def noted(self: TimedRounds, round_s: float, *, alone: bool = False) -> int:
        asked.append(round_s)
        return plain(self, round_s, alone=alone)

    monkeypatch.setattr(TimedRounds, "begin", noted)
    spec = job("bf16", "eager_attention")
    session, _ = session_with(spec, tmp_path, "well_behaved")
    Residents(session, 0).measure(variants_of(spec))
    assert len(variants_of(spec)) == 4
    assert asked[:4] == [LAP_S / 4] * 4


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


def test_who_computes_after_its_turn_is_waited_for(tmp_path: Path) -> None:
    calm, other = restless(tmp_path, 0.1).values()
    assert all(pause.rested for pause in other.pauses if pause.wall_s)
    assert sum(pause.used_s for pause in other.pauses) < 0.05 * sum(pause.wall_s for pause in other.pauses)
    # A turn is long beside the rest that it needs: it has fewer from the second lap on.
    assert len(other.turns[1]) < len(other.turns[0]) == len(calm.turns[0])
    assert len(calm.turns[1]) == len(calm.turns[0])


def test_who_never_rests_is_not_waited_for_without_end_and_its_work_is_counted(tmp_path: Path) -> None:
    _, other = restless(tmp_path, 60.0).values()
    paused = [pause for pause in other.pauses if pause.wall_s]
    # A look at its threads, one after the other, may miss which of them is at work.
    assert sum(pause.rested for pause in paused) <= 1 < len(paused)
    assert sum(pause.used_s for pause in paused) > 0.2 * sum(pause.wall_s for pause in paused)


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
