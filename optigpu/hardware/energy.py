"""Energy from a counter or from power, read regularly so that no wrap or jump is missed.

A CPU's counters are RAPL, through the kernel's power capping framework: those of the packages (cores, caches, memory
controller, graphics) and of the memory of each, AMD's under the same names. `psys`, the whole platform, is left out:
what it covers is up to the board's maker. `core` and `uncore` are parts of their package, and `intel-rapl-mmio` shows
the same packages. An AMD or Intel GPU is read by the kernel's hardware monitoring; nothing has run beside one.

`root` is the root of the file system. Sources: Linux, Documentation/power/powercap/powercap.rst,
ABI/testing/sysfs-class-powercap, Documentation/hwmon/sysfs-interface.rst, gpu/amdgpu/thermal.rst, and in ABI/testing
sysfs-driver-intel-i915-hwmon and sysfs-driver-intel-xe-hwmon: microwatts and microjoules.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from optigpu.hardware.cgroup import ROOT, contents
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.hardware.gpu import Gpu
from optigpu.hardware.sensors import SensorError
from optigpu.vocabulary import DeviceKind

PLAUSIBLE_W = 5000.0
"""More than any GPU or any host's CPUs draw: a counter that reports more has jumped."""
SLACK_S = 1.0
"""Counters are updated late: one step may contain this much more time than has passed."""


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


Flow = CounterFlow | PowerFlow


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


class EnergySensor:
    """The energy that flows into a device, from the creation of this object on.

    `source` names the counter, `scope` the parts that it covers, `resolution_j` its smallest step where that is known,
    `least_hz` how often it must be read to be correct. `changes` are in order.
    """

    period_s = 0.05
    """How often it should be read: twice as often as integrated power needs."""

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
        """The time from which on a change belongs to what begins now."""
        return time.perf_counter()

    def look(self) -> None:
        """Adds the energy since the last reading to `total`. Raises SensorError; the total is then invalid."""
        now_s = time.perf_counter()
        elapsed_s = now_s - self._at_s
        joules = sum(flow.since(elapsed_s) for flow in self._flows)
        before = self.total
        self._at_s = now_s
        found, changes = before.joules + joules, before.changes + (joules > 0)
        self.total = Energy(found, before.seconds + elapsed_s, before.looks + 1, changes)
        if joules > 0:
            self.changes.append(Change(now_s, self.total.joules))

    def stopped(self) -> str | None:
        """Why it counts no more, or None: a device's counter has no time of its own that could tell."""
        return None

    def why_few(self, changes: int, seconds: float) -> str:
        """The sentence for a sensor that changed so seldom in so many seconds."""
        if not changes:
            return f"{self.source}: the counter did not change for {seconds:.1f} s; measure energy on another host."
        return (
            f"{self.source}: the counter changed {changes} times in {seconds:.1f} s, too seldom for a figure; measure "
            "energy on another host."
        )

    def since(self, start: Energy) -> Energy:
        """The energy since the total was `start`."""
        end = self.total
        joules, seconds = end.joules - start.joules, end.seconds - start.seconds
        return Energy(joules, seconds, end.looks - start.looks, end.changes - start.changes)


def cpu_energy(root: Path = ROOT) -> EnergySensor:
    """The CPU's packages and their memory. Raises SensorError if there is no readable counter.

    A 32-bit counter wraps after several minutes at full power, so a look each second is enough.
    """
    domains = energy_domains(root)
    flows = [
        CounterFlow(name, partial(_joules, folder / "energy_uj"), _joules(folder / "max_energy_range_uj"))
        for name, folder in domains
    ]
    names = ", ".join(name for name, _ in domains)
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


_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")


def energy_domains(root: Path = ROOT) -> list[tuple[str, Path]]:
    """The name and the folder of the counter of every package, and of its memory where counted. Raises SensorError if
    there is none."""
    folder = root / "sys/class/powercap"
    zones = sorted(zone for zone in folder.glob("intel-rapl:*") if _ZONE.fullmatch(zone.name))
    names = {zone.name: _text(zone / "name") for zone in zones}
    packages = {zone: name for zone, name in names.items() if name.startswith("package")}
    memories = {
        zone: f"{packages[parent]} dram"
        for zone, name in names.items()
        if name == "dram" and (parent := zone.rpartition(":")[0]) in packages
    }
    if not packages:
        raise SensorError(
            "This machine has no energy counter of its CPU (no RAPL package in /sys/class/powercap), like most virtual "
            "machines; measure energy on a host that has one, or with a wall meter (docs/measure.md)."
        )
    return [(name, folder / zone) for zone, name in sorted((packages | memories).items())]


def _joules(path: Path) -> float:
    """Of a count of microjoules. Raises SensorError if it cannot be read."""
    text = _text(path)
    if not text.isdecimal():
        raise SensorError(f"The energy counter {path} holds {text[:40]!r}, which is not a number.")
    return int(text) / 1e6


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except PermissionError:
        raise SensorError(
            f"Only root may read the CPU's energy counter ({path}); run as root, or make the file readable by "
            "others."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SensorError(
            f"The energy counter {path} cannot be read ({type(error).__name__}); check that the machine still has it."
        ) from error


_CARD = re.compile(r"card\d+")
_WALL = "connect a wall meter (docs/measure.md)"


_MONITORS = {
    DeviceKind.ROCM: (("amdgpu",), "power1_average"),
    DeviceKind.XPU: (("i915", "xe"), "energy1_input"),
}
"""The names that the drivers' monitors have, and the file that is read: a power, or a count of energy."""


def kernel_energy(device: DeviceKind, root: Path = ROOT) -> EnergySensor:
    """The one GPU of that kind. Raises SensorError if there is no file of it, or which one is torch's is unknown."""
    reason = KINDS[device].lacks.get(Ability.ENERGY)
    if reason:
        raise SensorError(f"There is no energy of an {KINDS[device].title}: {reason}; {_WALL}.")
    (drivers, file), title = _MONITORS[device], KINDS[device].title
    cards = (card for card in (root / "sys/class/drm").glob("card*") if _CARD.fullmatch(card.name))
    folders = (folder for card in cards for folder in card.glob("device/hwmon/hwmon*"))
    named = (folder for folder in folders if contents(folder / "name") in drivers)
    files = sorted(folder / file for folder in named if (folder / file).is_file())
    if not files:
        raise SensorError(
            f"The kernel tells no energy of an {title} (no {file} in /sys/class/drm/card*/device/hwmon); {_WALL}."
        )
    if len(files) > 1:
        raise SensorError(
            f"The kernel tells the energy of {len(files)} {title}s, and not which of them torch uses; {_WALL}."
        )
    driver, scope = contents(files[0].parent / "name"), "what the GPU's driver counts, not the host"

    def read() -> float:
        text = contents(files[0])
        if not text.isdecimal():
            raise SensorError(f"{files[0]} holds no number; {_WALL}.")
        return int(text) / 1e6

    if file.startswith("power"):
        return EnergySensor(f"{driver}'s {file}, integrated", scope, None, 10.0, [PowerFlow(read)])
    return EnergySensor(f"{driver}'s {file}", scope, 1e-6, 1.0, [CounterFlow(driver, read)])
