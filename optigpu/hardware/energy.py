"""Energy from a counter or from power, read regularly so that no wrap or jump is missed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from optigpu.hardware.cgroup import ROOT
from optigpu.hardware.nvml import Gpu
from optigpu.hardware.powercap import energy_domains
from optigpu.hardware.sensors import SensorError

PLAUSIBLE_W = 5000.0
"""More than any GPU or any host's CPUs draw (8-socket servers included): a counter that reports more has jumped."""
SLACK_S = 1.0
"""Counters are updated late: one step may contain this much more time than has passed."""


class Flow(Protocol):
    """Joules since the last reading."""

    def since(self, elapsed_s: float) -> float:
        """Joules in the `elapsed_s` since the last reading. Raises SensorError if the reading is not plausible."""


class CounterFlow:
    """A counter of joules that only rises, apart from its wrap."""

    def __init__(self, name: str, read_j: Callable[[], float], wraps_at_j: float | None = None) -> None:
        self._name = name
        self._read_j = read_j
        self._wraps_at_j = wraps_at_j
        self._last_j = read_j()

    def since(self, elapsed_s: float) -> float:
        """The counter's increase, wraps included. An implausible one ends the measurement."""
        before, now = self._last_j, self._read_j()
        self._last_j = now
        step = now - before
        if step < 0 and self._wraps_at_j is not None:
            step += self._wraps_at_j
        if step < 0:
            raise SensorError(
                f"The energy counter of {self._name} fell from {before:.3f} to {now:.3f} J; it was reset; "
                "measure again."
            )
        if step > PLAUSIBLE_W * (elapsed_s + SLACK_S):
            raise SensorError(
                f"The energy counter of {self._name} jumped from {before:.3f} to {now:.3f} J within {elapsed_s:.2f} s, "
                "more than any device draws; measure again."
            )
        return step


class PowerFlow:
    """Power, integrated by the trapezoidal rule."""

    def __init__(self, read_w: Callable[[], float]) -> None:
        self._read_w = read_w
        self._last_w = read_w()

    def since(self, elapsed_s: float) -> float:
        """The mean of the power now and at the last look, times the time between."""
        before, self._last_w = self._last_w, self._read_w()
        return (before + self._last_w) / 2 * elapsed_s


@dataclass(frozen=True)
class Energy:
    """The energy of a period: `looks` readings in it, of which `changes` found a new value."""

    joules: float
    seconds: float
    looks: int
    changes: int

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass(frozen=True)
class Change:
    """A reading with more joules than the one before: when, on the sensor's clock, and a count of joules until then."""

    at_s: float
    joules: float


class CountingSensor(Protocol):
    """What counts joules in steps, from which only whole steps are taken.

    `source` names it, `scope` the parts that it covers, `resolution_j` its smallest step where that is known. It must
    be read `least_hz` times a second to be correct, and should be every `period_s`. `changes` are in order.
    """

    source: str
    scope: str
    resolution_j: float | None
    least_hz: float
    period_s: float
    changes: list[Change]

    @property
    def looks(self) -> int:
        """How often it was read."""

    def from_now_s(self) -> float:
        """The time from which on a change belongs to what begins now."""

    def look(self) -> None:
        """Reads it. Raises SensorError if it fails or what it says cannot be true."""

    def stopped(self) -> str | None:
        """Why it counts no more, or None."""

    def why_few(self, changes: int, seconds: float) -> str:
        """The sentence for a sensor that changed so seldom in so many seconds."""


def between_changes(sensor: CountingSensor, from_s: float) -> Energy:
    """The energy from the first change since `from_s` to the last one: whole steps of the counter. `looks` is 0."""
    changes = [change for change in sensor.changes if change.at_s >= from_s]
    if not changes:
        return Energy(0.0, 0.0, 0, 0)
    first, last = changes[0], changes[-1]
    return Energy(last.joules - first.joules, last.at_s - first.at_s, 0, len(changes))


class EnergySensor:
    """The energy that flows into a device, from the creation of this object on.

    `source` names the counter, `scope` the parts that it covers, `least_hz` how often it must be read to be correct.
    """

    period_s = 0.05
    """Twice as often as integrated power needs."""

    def __init__(
        self, source: str, scope: str, resolution_j: float | None, least_hz: float, flows: Sequence[Flow]
    ) -> None:
        self.source = source
        self.scope = scope
        self.resolution_j = resolution_j
        self.least_hz = least_hz
        self.changes: list[Change] = []
        self._flows = flows
        self._at_s = time.perf_counter()
        self.total = Energy(0.0, 0.0, 0, 0)

    @property
    def looks(self) -> int:
        return self.total.looks

    def from_now_s(self) -> float:
        return time.perf_counter()

    def look(self) -> None:
        """Adds the energy since the last reading to `total`. Raises SensorError; the total is then invalid."""
        now_s = time.perf_counter()
        elapsed_s = now_s - self._at_s
        joules = sum(flow.since(elapsed_s) for flow in self._flows)
        before = self.total
        self._at_s = now_s
        self.total = Energy(
            before.joules + joules,
            before.seconds + elapsed_s,
            before.looks + 1,
            before.changes + (joules > 0),
        )
        if joules > 0:
            self.changes.append(Change(now_s, self.total.joules))

    def stopped(self) -> str | None:
        """A device's counter has no time of its own that could tell."""
        return None

    def why_few(self, changes: int, seconds: float) -> str:
        """Says that it stood still, or how seldom it changed."""
        if not changes:
            return f"{self.source}: the counter did not change for {seconds:.1f} s; measure energy on another host."
        return (
            f"{self.source}: the counter changed {changes} times in {seconds:.1f} s, too seldom for a figure; measure "
            "energy on another host."
        )

    def since(self, start: Energy) -> Energy:
        """The energy since the total was `start`."""
        end = self.total
        return Energy(
            end.joules - start.joules,
            end.seconds - start.seconds,
            end.looks - start.looks,
            end.changes - start.changes,
        )


def cpu_energy(root: Path = ROOT) -> EnergySensor:
    """The CPU's packages and their memory. Raises SensorError if there is no readable counter.

    A 32-bit counter wraps after several minutes at full power, so a look each second is enough.
    """
    domains = energy_domains(root)
    flows = [CounterFlow(domain.name, domain.energy_j, domain.wraps_at_j) for domain in domains]
    names = ", ".join(domain.name for domain in domains)
    scope = f"{names}: everything that runs on this host, without GPU, disk, fan and power supply"
    return EnergySensor("RAPL counters (powercap)", scope, 1e-6, 1.0, flows)


def gpu_energy(gpu: Gpu) -> EnergySensor:
    """The GPU's energy counter, else its integrated power. Raises SensorError if it has neither."""
    scope = "the GPU's board, not the host"
    try:
        counter = CounterFlow(f"the GPU {gpu.name()}", gpu.energy_j)
    except SensorError as no_counter:
        try:
            power = PowerFlow(gpu.power_w)
        except SensorError:
            raise no_counter from None
        return EnergySensor("NVML power, integrated", scope, None, 10.0, [power])
    return EnergySensor("NVML total energy counter", scope, 1e-3, 1.0, [counter])
