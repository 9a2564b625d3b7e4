"""Honest processes beside noise of every kind: no wrong accusation, and an interval that reaches the quiet figure."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts.cost import times, widened
from optigpu.documents.result import Measurement, VerdictReason, VerdictWarning
from optigpu.statistics.intervals import summarise
from tests.unit.made_replicates import evidence, spec, verdict
from tests.unit.noisy_machines import NOISES, Machine, Moment, beside

pytestmark = pytest.mark.slow
RUNS = 34
"""Of each kind of noise: 204 together."""
RIGHT = {
    "steady": {VerdictReason.FOREIGN_PROCESS},
    "bursts": {VerdictReason.FOREIGN_PROCESS},
    "steal": {VerdictReason.FOREIGN_PROCESS},
    "throttle": {VerdictReason.THROTTLED},
    "slow_drift": {VerdictReason.DRIFT},
    "stalls": set(),
}
"""The reasons that each kind of noise may have."""


def honest(noise: Callable[[np.random.Generator], Machine], seed: int) -> tuple[list[Replicate], float]:
    """Three replicates one after the other, and the seconds of a request on the quiet machine."""
    rng = np.random.default_rng(seed)
    machine, quiet_s = noise(rng), float(10 ** rng.uniform(-2, 0))
    return [machine.replicate(quiet_s, rounds=int(rng.integers(10, 20))) for _ in range(3)], quiet_s


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.__name__)
def test_noise_is_never_taken_for_something_else(noise: Callable[[np.random.Generator], Machine]) -> None:
    reached, marked = 0, 0
    for seed in range(RUNS):
        replicates, quiet_s = honest(noise, seed)
        judged = verdict(*replicates)
        assert set(judged.reasons) <= RIGHT[noise.__name__], (seed, judged.notes)
        assert all(note.endswith(".") for note in judged.notes)
        if judged.valid and VerdictWarning.DISTURBED in judged.warnings:
            marked += 1
            reached += quiet_s * 1.01 >= reach(replicates, judged.cost_bound)
    assert reached >= 0.95 * marked, (reached, marked)


def reach(replicates: list[Replicate], bound: float | None) -> float:
    """The lower end of the latency's interval."""
    found = evidence(replicates, spec())
    measured = tuple(each.selection.of(each.replicate.samples["latency_s"]) for each in found)
    summary = summarise(Measurement(name="latency_s", samples=measured))
    (latency,) = widened({"latency_s": summary}, {"latency_s": bound}).values()
    assert latency.ci is not None
    return latency.ci[0]


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.__name__)
def test_outputs_from_memory_are_found_beside_every_noise(
    noise: Callable[[np.random.Generator], Machine],
) -> None:
    """Fresh inputs take two hundred times as long as those whose outputs are remembered."""
    for seed in range(5):
        machine = noise(np.random.default_rng(seed))
        cheat = machine.replicate(quiet_s=0.002, rounds=10, fresh_ratio=200)
        assert VerdictReason.CACHED_RESULT in verdict(cheat).reasons, seed


def test_rounds_that_others_disturbed_are_set_aside_and_their_figure_is_the_quiet_one() -> None:
    """Bursts of two seconds in ten, which take a fifth of a core on average."""
    busy = beside(1.0, lost=0.65)
    machine = Machine(lambda time: busy if time % 10 < 2 else Moment(), np.random.default_rng(0))
    made = machine.replicate(0.05, rounds=40)
    (found,) = evidence([made], spec())
    assert np.median(found.times("latency_s")) == pytest.approx(0.05, rel=0.02)
    assert np.mean(times("latency_s", made.samples["latency_s"])) > 0.055, "all rounds together are slower"
    assert verdict(made).warnings == ()
    marked = [record for record in found.selection.records if record.marks]
    assert 8 <= len(marked) <= 14
    assert not any(record.counted for record in marked)
    assert sum(record.requests for record in found.selection.records) == len(made.samples["latency_s"])


def test_a_drift_that_no_counter_shows_is_found_and_one_that_others_explain_is_not() -> None:
    halved = Moment(speed=0.5)
    machine = Machine(lambda time: halved if time > 12 else Moment(), np.random.default_rng(0))
    several = [machine.replicate(0.05, rounds=20) for _ in range(3)]
    assert verdict(*several).reasons == (VerdictReason.DRIFT,)
    loaded = [
        replace(each, host_samples=tuple(replace(s, foreign_s=0.6 * s.wall_s) for s in each.host_samples))
        for each in several[1:]
    ]
    assert verdict(several[0], *loaded).reasons == (VerdictReason.FOREIGN_PROCESS,)


def test_a_small_drift_is_a_mark_and_the_interval_reaches_its_fast_side() -> None:
    slower = Moment(speed=0.74)
    machine = Machine(lambda time: slower if time > 12 else Moment(), np.random.default_rng(0))
    several = [machine.replicate(0.05, rounds=20) for _ in range(3)]
    judged = verdict(*several)
    assert judged.warnings == (VerdictWarning.DISTURBED,)
    assert "the last third took 1.3" in judged.notes[0]
    assert reach(several, judged.cost_bound) <= 0.05
