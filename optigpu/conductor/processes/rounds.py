"""One replicate: a ready process measures rounds until the median is known, then an audit and its meters.

Between two rounds of a process other processes may measure one: that is how variants are interleaved.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.child.messages import Assignment, Audited, Metered, Ready, Round, RunAudit, RunMeter, RunRound
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.processes.child import Child
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.statistics.intervals import FEWEST_REQUESTS, relative_width
from optigpu.vocabulary import METRICS, ReplicateError

MOST_REQUESTS = 100_000
"""Of one replicate: more would fill memory and database without making an interval noticeably shorter."""
FIRST_ROUNDS = 4
"""The number of rounds in which the minimum time is spent, so that variants side by side take turns."""
AUDIT_REQUESTS, AUDIT_SECONDS = 3, 4.0
"""An audit has this many requests with fresh inputs, or one fewer if they would take longer than that.

Short ones take turns with requests that have the timed inputs, since a disturbance may be over soon.
"""
READY, SAMPLED, METERED = 0.4, 0.9, 1.0
"""The share of a replicate that the progress bar shows at the end of each part."""


@dataclass(frozen=True)
class Replicate:
    """The measurements of one process."""

    ready: Ready
    # For each metric a number for each request.
    samples: dict[str, tuple[float, ...]]
    # How many requests each round had.
    rounds: tuple[int, ...]
    # What other processes did on the machine during each round.
    host_samples: tuple[HostSample, ...]
    # Width of the 95% interval of the primary metric's median, relative to the median, after the last round.
    width: float
    audit: Audited | None = None
    metered: tuple[Metered, ...] = ()


class TimedRounds:
    """The timed requests of one ready process, gathered round by round."""

    def __init__(self, child: Child, ready: Ready, assignment: Assignment, monitor: HostMonitor) -> None:
        self._child, self._ready, self._assignment, self._monitor = child, ready, assignment, monitor
        self._measure, self._workload = assignment.measure, assignment.variant.workload
        self._collected: dict[str, list[float]] = {name: [] for name in self._workload.metrics}
        self._primary = self._collected[self._workload.primary]
        self._rounds: list[int] = []
        self._host_samples: list[HostSample] = []
        self._spent_s = 0.0
        self._width = math.inf
        affordable = int(self._measure.max_seconds / max(ready.request_s, 1e-9))
        self._fewest = max(1, min(FEWEST_REQUESTS, affordable))

    @property
    def are_over(self) -> bool:
        """Whether the median is known as precisely as was asked for, or the time is up."""
        has_time = self._left_s >= self._ready.request_s
        if not self._rounds or (len(self._rounds) < FIRST_ROUNDS and has_time):
            return False
        enough = self._width <= self._measure.rel_ci or len(self._primary) >= MOST_REQUESTS
        return enough or not has_time

    def measure_one(self, progress: JobProgress) -> None:
        """Measures one round of requests.

        The interval is computed after the first rounds, and from then on each round is half as long as all before it
        together: checking more often would stop at the first interval that is narrow by chance.
        """
        seconds, fewest = self._next()
        order = RunRound(
            seconds=seconds, min_requests=fewest, max_requests=MOST_REQUESTS - len(self._primary)
        )
        with progress.advance(self._share_after(seconds), max(seconds, fewest * self._ready.request_s)):
            before, began = self._monitor.read(), time.monotonic()
            found = ask(self._child, order, Round, progress)
            self._spent_s += time.monotonic() - began
            self._host_samples.append(self._monitor.between(before, self._monitor.read()))
            self._collect(found)
            if len(self._rounds) >= FIRST_ROUNDS or self._left_s < self._ready.request_s:
                self._width = relative_width(self._primary, self._assignment.seed)

    def replicate(self) -> Replicate:
        """The measurements so far, without audit and meters."""
        return Replicate(
            ready=self._ready,
            samples={name: tuple(values) for name, values in self._collected.items()},
            rounds=tuple(self._rounds),
            host_samples=tuple(self._host_samples),
            width=self._width,
        )

    @property
    def _left_s(self) -> float:
        return self._measure.max_seconds - self._spent_s

    def _next(self) -> tuple[float, int]:
        """Seconds and the least number of requests of the next round."""
        first_left = FIRST_ROUNDS - len(self._rounds)
        if first_left > 0:
            seconds = self._measure.min_seconds / FIRST_ROUNDS
            return seconds, max(1, math.ceil((self._fewest - len(self._primary)) / first_left))
        return min(self._spent_s / 2, self._left_s), 1

    def _share_after(self, seconds: float) -> float:
        """The share of the replicate that is done after so many more seconds.

        Rounds are taken to end half way between `min_seconds` and `max_seconds`.
        """
        done = min(
            1.0, 2 * (self._spent_s + seconds) / (self._measure.max_seconds + self._measure.min_seconds)
        )
        return READY + (SAMPLED - READY) * done

    def _collect(self, found: Round) -> None:
        lengths = {len(values) for values in found.samples.values()}
        if set(found.samples) != set(self._collected) or len(lengths) != 1 or 0 in lengths:
            got = ", ".join(f"{name} ({len(values)})" for name, values in found.samples.items())
            raise ReplicateError(
                f"A round must have each of {', '.join(self._collected)} for every request; this one had {got}."
            )
        for name, values in found.samples.items():
            if min(values) <= 0:
                raise ReplicateError(f"The {name} of a request is {min(values):g}; it must be positive.")
            self._collected[name].extend(values)
        self._rounds.append(lengths.pop())


def audit(child: Child, ready: Ready, progress: JobProgress) -> Audited:
    """Requests with fresh inputs, and a last check of the output."""
    progress.show("checking with fresh inputs")
    few = AUDIT_REQUESTS * ready.request_s > AUDIT_SECONDS
    repeat = 2 * AUDIT_REQUESTS * ready.request_s < AUDIT_SECONDS
    return ask(child, RunAudit(requests=AUDIT_REQUESTS - few, repeat=repeat), Audited, progress)


def read_meters(child: Child, meters: Sequence[str], progress: JobProgress) -> tuple[Metered, ...]:
    """One reading of each meter, in the given order."""
    readings = []
    for meter in meters:
        progress.show(f"reading the {meter} meter")
        readings.append(_checked(ask(child, RunMeter(meter=meter), Metered, progress)))
    return tuple(readings)


def _checked(metered: Metered) -> Metered:
    unknown = sorted({*metered.values, *metered.reasons} - set(METRICS))
    if unknown:
        raise ReplicateError(f"The meter {metered.meter} gave unknown metrics: {', '.join(unknown)}.")
    return metered
