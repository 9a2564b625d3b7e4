"""Clocks, temperatures, power and load of a machine while it works, as probes that are read repeatedly.

`root` is the root of the file system, so that a test can hand in another.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean

from optigpu.hardware.cgroup import ROOT
from optigpu.hardware.counters import clock_files, heat_files, numbers
from optigpu.hardware.energy import EnergySensor, cpu_energy
from optigpu.hardware.nvml import SLOWDOWNS, Gpu
from optigpu.hardware.sensors import SensorError

_FIRST_POWER_S = 0.05

Probe = Callable[[], float]
"""Reads one number. Raises SensorError if it cannot be read."""


@dataclass(frozen=True)
class Probes:
    """The readable probes, by a name with its unit, and the reasons why others are not."""

    probes: Mapping[str, Probe] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: "Probes") -> "Probes":
        return Probes({**self.probes, **other.probes}, {**self.reasons, **other.reasons})


def gpu_probes(gpu: Gpu) -> Probes:
    """Clocks, temperature, power, utilization, and each throttle reason as 0 or 1."""
    probes: dict[str, Probe] = {
        "gpu_sm_clock_hz": gpu.sm_clock_hz,
        "gpu_memory_clock_hz": gpu.memory_clock_hz,
        "gpu_temperature_c": gpu.temperature_c,
        "gpu_power_w": gpu.power_w,
        "gpu_utilization": gpu.utilization,
    }
    slowdowns = {f"gpu_slowdown_{name}": partial(_slowdown, gpu, name) for name in SLOWDOWNS.values()}
    return Probes(probes | slowdowns)


def cpu_probes(root: Path = ROOT) -> Probes:
    """The mean clock of the CPUs that this process may use, thermal zones, power, throttling for heat, and load."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return (
        _files("cpu_clock_hz", "clocks (cpufreq)", clock_files(cpus, root), _mean_hz)
        | _temperatures(root)
        | _power(root)
        | _files("cpu_heat_slowdowns", "heat slowdowns (thermal_throttle)", heat_files(cpus, root), _total)
        | Probes({"load_1min": partial(_load, root)})
    )


def _slowdown(gpu: Gpu, name: str) -> float:
    return float(name in gpu.slowdowns())


def _files(
    name: str, what: str, files: tuple[Path, ...], read: Callable[[tuple[Path, ...]], float]
) -> Probes:
    if not files:
        why = f"This machine reports no {what} of its CPUs, like most virtual machines."
        return Probes(reasons={name: why})
    return Probes({name: partial(read, files)})


def _mean_hz(files: tuple[Path, ...]) -> float:
    return mean(_numbers(files)) * 1e3  # kHz


def _total(files: tuple[Path, ...]) -> float:
    """The count since boot; only its increase during requests matters."""
    return float(sum(_numbers(files)))


def _numbers(files: tuple[Path, ...]) -> list[int]:
    found = numbers(files)
    if not found:
        raise SensorError(f"{files[0]} can no longer be read.")
    return found


def _temperatures(root: Path) -> Probes:
    zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
    probes = {
        f"cpu_temperature_c.{zone.name.removeprefix('thermal_zone')}.{_type(zone)}": partial(_celsius, zone)
        for zone in zones
    }
    if not probes:
        return Probes(
            reasons={
                "cpu_temperature_c": "This machine reports no thermal zones, like most virtual machines."
            }
        )
    return Probes(probes)


def _type(zone: Path) -> str:
    try:
        return (zone / "type").read_text().strip()
    except OSError:
        return "unknown"


def _celsius(zone: Path) -> float:
    try:
        return int((zone / "temp").read_text()) / 1e3
    except (OSError, ValueError) as error:
        raise SensorError(f"{zone / 'temp'} cannot be read ({type(error).__name__}).") from error


def _power(root: Path) -> Probes:
    try:
        sensor = cpu_energy(root)
    except SensorError as error:
        return Probes(reasons={"cpu_power_w": str(error)})
    return Probes({"cpu_power_w": partial(_watts, sensor)})


def _watts(sensor: EnergySensor) -> float:
    """The mean power since the last reading; the first one waits, since the counter moves in steps."""
    start = sensor.total
    if not start.looks:
        time.sleep(_FIRST_POWER_S)
    sensor.look()
    return sensor.since(start).watts


def _load(root: Path) -> float:
    try:
        return float((root / "proc/loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError) as error:
        raise SensorError(f"/proc/loadavg cannot be read ({type(error).__name__}).") from error
