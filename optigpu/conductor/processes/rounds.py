"""One replicate: a ready process measures rounds until the median is known, then an audit and its meters.

Where several processes are measured side by side, a lap is one round of each: every round consists of short turns, and
between them others have theirs. A round that was disturbed is set aside, and another one measured in its place.
"""

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from optigpu.child.messages import Assignment, Audited, Metered, Ready, Round, RunAudit, RunMeter, RunRound
from optigpu.conductor.processes.child import Child, ask
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.verdicts.disturbance import Goal, Selection, Yardstick, select
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.documents.facts import KernelFacts
from optigpu.documents.rounds import LoadRun
from optigpu.hardware.counters import cpu_clock_s, needs_cpu
from optigpu.job.estimate import AUDIT, SAMPLE
from optigpu.meters import METERS
from optigpu.statistics.within import enough_for
from optigpu.vocabulary import METRICS, DeviceKind, ReplicateError

TRIES = 2
"""A meter that times requests is read so often where each reading is disturbed; the least disturbed one counts."""


@dataclass(frozen=True)
class MeterReading:
    """What a meter read."""

    metered: Metered
    # What other processes did meanwhile; None for a meter that times no requests.
    during: HostSample | None = None


@dataclass(frozen=True)
class Metering:
    """Reads meters of a ready process."""

    child: Child
    device: DeviceKind
    monitor: HostMonitor
    progress: JobProgress

    def read(self, meters: Sequence[str]) -> tuple[MeterReading, ...]:
        found = []
        for meter in meters:
            self.progress.show(f"reading the {meter} meter", meter)
            with self.progress.advance(meter):
                timed = METERS[meter].timed
                found.append(self._timed(meter) if timed else MeterReading(self._ask(meter)))
        return tuple(found)

    def _timed(self, meter: str) -> MeterReading:
        found: dict[float, MeterReading] = {}
        for _ in range(TRIES):
            before = self.monitor.read()
            metered = self._ask(meter)
            during = self.monitor.between(before, self.monitor.read())
            yardstick = Yardstick(self.device, self.monitor.fastest_probe_s)
            found.setdefault(yardstick.lost_share(during), MeterReading(metered, during))
            if not yardstick.marks(during) or during.wall_s > self.progress.time_left_s:
                break
        return found[min(found)]

    def _ask(self, meter: str) -> Metered:
        metered = ask(self.child, RunMeter(meter=meter), Metered, self.progress)
        unknown = sorted({*metered.values, *metered.reasons} - set(METRICS))
        if unknown:
            raise ReplicateError(f"The meter {metered.meter} gave unknown metrics: {', '.join(unknown)}.")
        return metered


MOST_REQUESTS = 100_000
"""Of one replicate: more would fill memory and database without making an interval noticeably shorter."""
ROUND_S = 0.4
"""Seconds of a round: short, so that what disturbs a moment costs one round, and long enough for the kernel's ticks to
show it. A request that takes longer is a round by itself."""
FIRST_ROUNDS = 4
"""The fewest rounds in which the minimum time is spent, so that variants side by side take turns."""
SETTLED_SHARE = 0.25
"""Of the turns of a round, for a process that has enough: it goes on for the ratios of the others to it."""
PATIENCE = 2
"""After this many times the minimum time it is asked whether `max_seconds` will give enough clean rounds."""
AUDIT_REQUESTS, AUDIT_PAIRS, AUDIT_SECONDS = 3, 8, 4.0
"""An audit has this many requests with fresh inputs, or one fewer if they would take longer than that. Short ones take
turns with requests that have the timed inputs: so many pairs, if they fit, that it is no chance if all are slow."""


@dataclass(frozen=True)
class Pause:
    """Time in which a process was asked nothing, and the CPU seconds that it used."""

    wall_s: float
    used_s: float
    # Whether it was seen at rest after each of its turns.
    rested: bool = False


@dataclass(frozen=True)
class Replicate:
    """The measurements of one process."""

    ready: Ready
    # For each metric a number for each request.
    samples: dict[str, tuple[float, ...]]
    # How many requests each round had.
    rounds: tuple[int, ...]
    # What other processes did on the machine during each round, or during the lap that it is a part of.
    host_samples: tuple[HostSample, ...]
    # Whether the rounds that figures come from are as many as the median's interval needed, by what an earlier look at
    # them foresaw.
    settled: bool
    # How many requests each turn of each round had: none for a round that was measured by itself. Empty: all were.
    turns: tuple[tuple[int, ...], ...] = ()
    # Seconds of each round without the turns of others; empty: as long as it was watched.
    seconds: tuple[float, ...] = ()
    # Seconds of each request; empty where the process does not say.
    request_s: tuple[float, ...] = ()
    # What became of the queries of each request, where it is a run of a load.
    loads: tuple[LoadRun, ...] = ()
    # Seconds that passed by the conductor's clock between each round's command and its answer.
    outside_s: tuple[float, ...] = ()
    # What the process used before each round's turns, from its first round on, while others had theirs.
    pauses: tuple[Pause, ...] = ()
    # What the machine did from the last word before the warm-up to Ready; None: it was not watched.
    warm_up: HostSample | None = None
    audit: Audited | None = None
    # What other processes did during the audit.
    audit_sample: HostSample | None = None
    readings: tuple[MeterReading, ...] = ()
    # How its answers were held against another process's, where they were.
    kernel: KernelFacts | None = None

    @property
    def metered(self) -> tuple[Metered, ...]:
        return tuple(reading.metered for reading in self.readings)

    def selection(self, yardstick: Yardstick, goal: Goal) -> Selection:
        return select(self.rounds, self.host_samples, yardstick, goal, self.turns, self.seconds)


@dataclass
class _OpenRound:
    """A round that has begun: how long its turns are to be, and what came of them."""

    turn_s: float
    # The least number of requests of a turn.
    fewest: int
    alone: bool
    # How many requests each turn had.
    turns: list[int] = field(default_factory=list)
    outside_s: float = 0.0
    # The time before its turns in which nothing was asked, and the CPU seconds that the process used in it.
    paused_s: float = 0.0
    used_s: float = 0.0
    rested: bool = True
    # How long it was without the turns of others, and what the machine did meanwhile.
    seconds: float = 0.0
    sample: HostSample = field(default_factory=lambda: HostSample(0.0))


class TimedRounds:
    """The timed requests of one ready process, gathered round by round."""

    def __init__(
        self,
        child: Child,
        ready: Ready,
        assignment: Assignment,
        monitor: HostMonitor,
        warm_up: HostSample | None = None,
    ) -> None:
        """`warm_up` is what the machine did while the process warmed up, where that was watched."""
        self._warm_up = warm_up
        self._child, self._ready, self._assignment, self._monitor = child, ready, assignment, monitor
        self._measure, self._workload = assignment.measure, assignment.variant.workload
        self._collected: dict[str, list[float]] = {name: [] for name in self._workload.metrics}
        self._primary = self._collected[self._workload.primary]
        self._ended: list[_OpenRound] = []
        self._request_s: list[float] = []
        self._loads: list[LoadRun] = []
        self._open = _OpenRound(0.0, 1, alone=True)
        # When the last turn ended and the CPU seconds of the process by then, and how long it took to rest.
        self._paused: tuple[float, float | None] | None = None
        self._rest_s = 0.0
        self._goal = Goal.of(self._measure, ready.request_s)
        self._spent_s, self._clean_s = 0.0, 0.0
        self._checked_at_s = self._measure.min_seconds
        # Whether the next look is the last one, and whether there was a last one.
        self._is_foreseen, self._is_settled = False, False

    @property
    def are_over(self) -> bool:
        """Whether the median is known as precisely as was asked for, or the time is up."""
        return self._is_settled or not self.can_go_on

    @property
    def typical(self) -> float | None:
        """The median of the primary metric so far; None before the first request."""
        return float(np.median(self._primary)) if self._primary else None

    def measure_one(self, progress: JobProgress) -> None:
        before = self._monitor.read()
        self.begin(ROUND_S, alone=True)
        self.take_turn(progress)
        self.end(self._monitor.between(before, self._monitor.read()))

    def begin(self, round_s: float, *, alone: bool = False) -> int:
        """A round of about `round_s` begins. Returns how many turns it has."""
        seconds, fewest = self._next(round_s)
        turn_s = max(TURN_S, self._ready.request_s, RESTS * self._rest_s)
        count = 1 if alone else max(1, round(seconds / turn_s))
        self._open = _OpenRound(seconds / count, math.ceil(fewest / count), alone)
        return count

    def take_turn(self, progress: JobProgress) -> None:
        """Measures one turn of the round that has begun, and waits until the process rests."""
        turn, room = self._open, MOST_REQUESTS - len(self._primary)
        if room < 1:
            return
        order = RunRound(seconds=turn.turn_s, min_requests=turn.fewest, max_requests=max(room, turn.fewest))
        with progress.advance(SAMPLE, max(turn.turn_s, turn.fewest * self._ready.request_s)):
            self._end_pause()
            began = time.monotonic()
            found = ask(self._child, order, Round, progress)
            turn.outside_s += time.monotonic() - began
            self._collect(found, max(room, turn.fewest))
            if not turn.alone:  # others have their turn now
                self._rest_s = rest_of(self._child.pid)
            turn.rested &= not turn.alone and self._rest_s < LONGEST_REST_S
            self._paused = time.monotonic(), cpu_clock_s(self._child.pid)

    def end(self, sample: HostSample) -> None:
        """The round is over, and `sample` is what the machine did meanwhile. Computes the interval when that is due."""
        ended = self._open
        ended.sample = sample
        ended.seconds = max(ended.turn_s * max(1, len(ended.turns)), ended.outside_s)
        self._ended.append(ended)
        self._spent_s += ended.seconds
        self._clean_s += 0.0 if self._yardstick.marks(sample) else ended.seconds
        self._check()

    def replicate(self) -> Replicate:
        ended = self._ended
        return Replicate(
            ready=self._ready,
            samples={name: tuple(values) for name, values in self._collected.items()},
            rounds=tuple(sum(each.turns) for each in ended),
            host_samples=tuple(each.sample for each in ended),
            settled=self._is_settled,
            turns=tuple(() if each.alone else tuple(each.turns) for each in ended),
            seconds=tuple(each.seconds for each in ended),
            request_s=tuple(self._request_s),
            loads=tuple(self._loads),
            outside_s=tuple(each.outside_s for each in ended),
            pauses=tuple(Pause(each.paused_s, each.used_s, each.rested) for each in ended),
            warm_up=self._warm_up,
        )

    def _end_pause(self) -> None:
        """Adds what the process used since its last turn, where the system counts that."""
        if self._paused is None:
            return
        began, before_s = self._paused
        used_s = cpu_clock_s(self._child.pid)
        if used_s is not None and before_s is not None:
            self._open.paused_s += time.monotonic() - began
            self._open.used_s += used_s - before_s

    @property
    def _left_s(self) -> float:
        return self._measure.max_seconds - self._spent_s

    @property
    def can_go_on(self) -> bool:
        """Whether there is time for another request. The first one is made however long it takes."""
        has_time = self._left_s >= self._ready.request_s and len(self._primary) < MOST_REQUESTS
        return has_time or not self._ended

    @property
    def _yardstick(self) -> Yardstick:
        return Yardstick(self._assignment.variant.device, self._monitor.fastest_probe_s)

    @property
    def _is_hopeless(self) -> bool:
        """Whether the time that is left will not give enough clean rounds, if they are as rare as they were."""
        missing_s = self._measure.min_seconds - self._clean_s
        if missing_s <= 0 or self._spent_s < PATIENCE * self._measure.min_seconds:
            return False
        return missing_s > self._left_s * self._clean_s / self._spent_s

    def _next(self, round_s: float) -> tuple[float, int]:
        first = max(FIRST_ROUNDS, math.ceil(self._measure.min_seconds / round_s))
        if len(self._ended) >= first:
            return min(round_s * (SETTLED_SHARE if self._is_settled else 1), self._left_s), 1
        seconds = self._measure.min_seconds / first
        fit = int(round_s / max(self._ready.request_s, 1e-9))
        due = math.ceil((self._goal.requests - len(self._primary)) / (first - len(self._ended)))
        return seconds, max(1, min(due, fit))

    def _check(self) -> None:
        """Looks at the median where there are enough clean rounds, where there never will be, or at the end."""
        basis_s = self._spent_s if self._is_hopeless else self._clean_s
        # Rounding must not make the last of the first rounds one too few.
        is_due = basis_s >= self._checked_at_s * (1 - 1e-9) and len(self._ended) >= FIRST_ROUNDS
        if is_due or not self.can_go_on:
            requests = [sum(each.turns) for each in self._ended]
            samples = [each.sample for each in self._ended]
            counted = select(requests, samples, self._yardstick, self._goal).of(self._primary)
            if len(counted) >= self._goal.requests:
                needed, ends = enough_for(np.asarray(counted), self._measure.rel_ci)
                self._is_settled = bool(needed <= len(counted)) or (is_due and self._is_foreseen)
                self._is_foreseen = bool(ends)
                self._checked_at_s = basis_s * float(needed) / len(counted)

    def _collect(self, found: Round, most: int) -> None:
        lengths = {len(values) for values in found.samples.values()}
        if max(lengths, default=0) > most:
            raise ReplicateError(
                f"A round gave {max(lengths)} requests, and at most {most} were asked for; the measuring process does "
                "not keep to its orders."
            )
        if not self._primary:
            some = [name for name in self._workload.for_some if name in found.samples]
            self._collected |= {name: [] for name in some}
        if set(found.samples) != set(self._collected) or len(lengths) != 1 or 0 in lengths:
            got = ", ".join(f"{name} ({len(values)})" for name, values in found.samples.items())
            raise ReplicateError(
                f"A round must have each of {', '.join(self._collected)} for every request; this one had {got}."
            )
        for name, values in found.samples.items():
            if min(values) <= 0:
                raise ReplicateError(f"The {name} of a request is {min(values):g}; it must be positive.")
            self._collected[name].extend(values)
        self._open.turns.append(lengths.pop())
        self._request_s.extend(found.request_s)
        self._loads.extend(found.loads)


def audit(
    child: Child, ready: Ready, monitor: HostMonitor, progress: JobProgress
) -> tuple[Audited, HostSample]:
    """Requests with fresh inputs, a last check of the output, and what other processes did meanwhile."""
    pairs = min(AUDIT_PAIRS, int(AUDIT_SECONDS / max(2 * ready.request_s, 1e-9)))
    repeat = pairs >= AUDIT_REQUESTS
    single = AUDIT_REQUESTS - (AUDIT_REQUESTS * ready.request_s > AUDIT_SECONDS)
    order = RunAudit(requests=pairs if repeat else single, seed=secrets.randbits(32), repeat=repeat)
    before = monitor.read()
    with progress.advance(AUDIT):
        audited = ask(child, order, Audited, progress)
    return audited, monitor.between(before, monitor.read())


TURN_S = 0.02
"""Seconds of a turn; a request that takes longer is a turn by itself. What disturbs a machine comes and goes within
tenths of a second: processes whose turns are shorter meet the same of it, and so their ratio stays the same."""
LOOK_S, AT_REST = 0.0005, 0.2
"""A process rests if no thread of it needs a CPU, and it used no more than this share of one core for so long."""
LONGEST_REST_S = 0.25
"""Libraries let threads wait for more work in a busy loop, for a fifth of a second at most."""
RESTS = 2
"""A turn is this many times as long as the rest that it needs."""


def in_turns(counts: Sequence[int]) -> Iterator[int]:
    """Whose turn it is, by the position in `counts`: each has so many, evenly spread over the same time."""
    due = [((turn + 0.5) / count, place) for place, count in enumerate(counts) for turn in range(count)]
    return (place for _, place in sorted(due))


def rest_of(pid: int) -> float:
    """Waits until a process that has answered needs no CPU, so that others have them all; returns how many seconds
    that took: LONGEST_REST_S at most, and 0 where the system does not count."""
    began, used_s = time.monotonic(), cpu_clock_s(pid)
    while used_s is not None and time.monotonic() - began < LONGEST_REST_S:
        time.sleep(LOOK_S)
        before_s, used_s = used_s, cpu_clock_s(pid)
        # A thread that waits for a CPU uses none, and of threads that wait for each other a look may see none at work.
        is_busy = needs_cpu(pid) or (used_s or 0.0) - before_s > AT_REST * LOOK_S
        if not is_busy:
            break
    return time.monotonic() - began
