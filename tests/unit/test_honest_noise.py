"""Honest processes beside noise of every kind: no wrong accusation, and an interval that reaches the quiet figure.

The machine is simulated: it has two cores whose speed others change. Requests follow each other; each takes its quiet
time over the machine's speed at that moment. The counters show what a real machine's would, in the kernel's ticks, and
the probe shows the speed of a core.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from optigpu.child.messages import Audited
from optigpu.conductor.processes.rounds import AUDIT_PAIRS, ROUND_S, Pause, Replicate
from optigpu.conductor.verdicts.cost import times, widened
from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Measurement, VerdictReason, VerdictWarning
from optigpu.statistics.intervals import summarise
from tests.breadth import spread
from tests.unit.made_replicates import evidence, replicate, samples, spec, verdict

pytestmark = pytest.mark.slow
PROBE_S = 0.0025
TICK_S = 0.01
DAEMONS = 0.015
"""Cores that a quiet host's own processes use."""


@dataclass(frozen=True)
class Moment:
    """The machine at one time: what a lockstep computation has of its speed, what a core has, and what is counted."""

    speed: float = 1.0
    core_speed: float = 1.0
    others: float = 0.0
    stolen: float = 0.0
    waiting: float = 0.0


Weather = Callable[[float], Moment]
"""The machine at each time of a job, in seconds."""


@dataclass
class Machine:
    """A machine with its clock. `stops` are the times at which one request stands still, each with its seconds."""

    weather: Weather
    rng: np.random.Generator
    stops: list[tuple[float, float]] = field(default_factory=list)
    now: float = 0.0
    worked_s: float = 0.0

    def request(self, quiet_s: float) -> float:
        """Seconds that a request takes that would take `quiet_s` on the quiet machine."""
        took_s = quiet_s * float(self.rng.lognormal(0, 0.02)) / self.weather(self.now).speed
        self.worked_s += took_s
        if self.stops and self.stops[0][0] <= self.now:
            took_s += self.stops.pop(0)[1]
        self.now += took_s
        return took_s

    def watch(self, work: Callable[[], None]) -> HostSample:
        """What the counters show of some work."""
        began, probe_s, worked_s = self.now, self._probe(), self.worked_s
        work()
        wall_s, worked_s = self.now - began, self.worked_s - worked_s
        times = np.linspace(began, self.now, 40, endpoint=False)
        moments = [self.weather(float(time)) for time in times]
        used = {
            name: wall_s * float(np.mean([getattr(moment, name) for moment in moments]))
            for name in ("others", "stolen", "waiting")
        }
        return HostSample(
            wall_s=wall_s,
            cpus=2,
            foreign_s=self._ticks(used["others"] + DAEMONS * wall_s),
            idle_s=max(0.0, self._ticks(2 * wall_s - worked_s - used["others"] - used["stolen"])),
            steal_s=self._ticks(used["stolen"]),
            named={"hog": used["others"]},
            quota_wait_s=used["waiting"],
            probe_s=max(probe_s, self._probe()),
        )

    def replicate(self, quiet_s: float, rounds: int, fresh_ratio: float = 1.0) -> Replicate:
        """A process's rounds and its audit, whose fresh inputs take `fresh_ratio` times as long as repeated ones."""
        taken: list[float] = []
        counts: list[int] = []
        request_s: list[float] = []
        outside_s: list[float] = []
        warm_up: list[float] = []
        pauses: list[Pause] = []

        def begin() -> None:
            warm_up.extend(self.request(quiet_s) for _ in range(3))

        def one_round() -> None:
            began, before = self.now, len(taken)
            self._message()
            ends = self.now + ROUND_S
            while self.now < ends:
                taken.append(self.request(quiet_s))
                request_s.append(taken[-1] * float(self.rng.uniform(1, 1.05)))
            counts.append(len(taken) - before)
            self._message()
            outside_s.append(self.now - began + sum(request_s[before:]) - sum(taken[before:]))

        def others_turn() -> None:
            """Whose threads spin for a moment after the round; the kernel counts in ticks."""
            wall_s = float(self.rng.uniform(0.3, 3.0))
            pauses.append(Pause(wall_s, self._ticks(float(self.rng.uniform(0, 0.2)))))

        host_samples: list[HostSample] = []
        for number in range(rounds):
            if number:
                others_turn()
            host_samples.append(self.watch(one_round))
        audit: list[float] = []
        pairs = min(AUDIT_PAIRS, int(2 / quiet_s))

        def checks() -> None:
            for _ in range(pairs):
                audit.extend((self.request(quiet_s), self.request(quiet_s * fresh_ratio)))

        during = self.watch(checks)
        slept = self.watch(begin)  # the last, so that it does not change when the rounds begin
        made = replicate(
            ready=replicate().ready.model_copy(
                update={"request_s": sorted(warm_up)[1], "facts": RunFacts(threads=2)}
            ),
            samples=samples(taken),
            rounds=tuple(counts),
            host_samples=tuple(host_samples),
            request_s=tuple(request_s),
            outside_s=tuple(outside_s),
            pauses=tuple(pauses),
            warm_up=slept,
        )
        audited = Audited(samples=samples(audit[1::2]), repeated=samples(audit[::2]))
        return replace(made, audit=audited, audit_sample=during)

    def _message(self) -> None:
        """A command or an answer on its way: who reads it waits for a core where others have them."""
        moment = self.weather(self.now)
        self.now += 0.002 + float(self.rng.exponential(0.02)) * (
            moment.others + moment.stolen + moment.waiting
        )

    def _probe(self) -> float:
        return PROBE_S * float(self.rng.lognormal(0, 0.03)) / self.weather(self.now).core_speed

    def _ticks(self, seconds: float) -> float:
        return round((seconds + float(self.rng.normal(0, 0.007))) / TICK_S) * TICK_S


def beside(cores: float, lost: float) -> Moment:
    """Others use so many cores, of which a lockstep computation loses the share `lost`."""
    return Moment(speed=1 - lost * min(cores, 0.95), others=cores)


def steady(rng: np.random.Generator) -> Machine:
    """A process that uses the same share of a core all the time."""
    moment = beside(float(rng.uniform(0.1, 1.3)), lost=float(rng.uniform(0.5, 0.9)))
    return Machine(lambda _: moment, rng)


def bursts(rng: np.random.Generator) -> Machine:
    """A process that computes for a while and then waits for a while."""
    busy, moment = _phases(rng), beside(float(rng.uniform(0.5, 1.0)), lost=float(rng.uniform(0.5, 0.9)))
    return Machine(lambda time: moment if busy(time) else Moment(), rng)


def steal(rng: np.random.Generator) -> Machine:
    """A hypervisor that gives the cores to others for a while."""
    busy, cores = _phases(rng), float(rng.uniform(0.1, 0.9))
    return Machine(lambda time: Moment(speed=1 - 0.9 * cores, stolen=cores) if busy(time) else Moment(), rng)


def throttle(rng: np.random.Generator) -> Machine:
    """A quota that makes threads wait for a while."""
    busy, share = _phases(rng), float(rng.uniform(0.1, 0.7))
    return Machine(lambda time: Moment(speed=1 - share, waiting=share) if busy(time) else Moment(), rng)


def slow_drift(rng: np.random.Generator) -> Machine:
    """A virtual machine that becomes slower, and perhaps faster again; no counter tells."""
    depth, period_s = float(rng.uniform(0.1, 0.4)), float(rng.uniform(20, 60))

    def weather(time: float) -> Moment:
        speed = 1 - depth * (0.5 - 0.5 * float(np.cos(2 * np.pi * time / period_s)))
        return Moment(speed=speed, core_speed=speed)

    return Machine(weather, rng)


def stalls(rng: np.random.Generator) -> Machine:
    """A machine on which one request stands still, now and then."""
    times = np.cumsum(rng.uniform(3, 15, 20))
    return Machine(lambda _: Moment(), rng, [(float(time), float(rng.uniform(1.5, 5))) for time in times])


NOISES = (steady, bursts, steal, throttle, slow_drift, stalls)


def _phases(rng: np.random.Generator) -> Callable[[float], bool]:
    """Whether something is busy at a time: by turns busy and not, for a twentieth of a second to some seconds."""
    typical_s = float(10 ** rng.uniform(-1.3, 0.5))
    share = float(rng.uniform(0.05, 0.6))
    lengths = np.concatenate(
        [rng.exponential(typical_s * np.array([1 - share, share]) * 2) for _ in range(2000)]
    )
    ends = np.cumsum(lengths)
    return lambda time: int(np.searchsorted(ends, time)) % 2 == 1


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


@pytest.mark.parametrize("noise", spread(NOISES, by_default=3), ids=lambda noise: noise.__name__)
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


@pytest.mark.parametrize("noise", spread(NOISES), ids=lambda noise: noise.__name__)
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
