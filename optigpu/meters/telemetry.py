"""telemetry: clocks, temperatures, power, throttling and load at 10 Hz while requests run.

`root` is the root of the file system, so that a test can hand in another.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from optigpu.documents.facts import MeterFacts
from optigpu.documents.selftest import Comparison
from optigpu.hardware.cgroup import ROOT
from optigpu.hardware.counters import clock_files, heat_files, numbers
from optigpu.hardware.cpu import allowed_cpus
from optigpu.hardware.energy import EnergySensor, cpu_energy
from optigpu.hardware.gpu import SLOWDOWNS, Gpu, job_gpu, require_sensors
from optigpu.hardware.sensors import SensorError, Ticker
from optigpu.meters.base import Meter, MeterContext, Reading, keep_running
from optigpu.vocabulary import DeviceKind, UnsupportedError, new_id

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

    def slowed(name: str) -> float:
        return float(name in gpu.slowdowns())

    slowdowns = {f"gpu_slowdown_{name}": partial(slowed, name) for name in SLOWDOWNS.values()}
    return Probes(probes | slowdowns)


def cpu_probes(root: Path = ROOT) -> Probes:
    """The mean clock of the CPUs that this process may use, thermal zones, power, throttling for heat, and load."""
    cpus = allowed_cpus()
    return (
        _files("cpu_clock_hz", "clocks (cpufreq)", clock_files(cpus, root), lambda khz: mean(khz) * 1e3)
        | _temperatures(root)
        | _power(root)
        | _files("cpu_heat_slowdowns", "heat slowdowns (thermal_throttle)", heat_files(cpus, root), sum)
        | Probes({"load_1min": partial(_first_number, root / "proc/loadavg", "/proc/loadavg")})
    )


def _files(name: str, what: str, files: tuple[Path, ...], of: Callable[[Sequence[int]], float]) -> Probes:
    """What `of` makes of the numbers in the files."""
    if not files:
        why = f"This machine reports no {what} of its CPUs, like most virtual machines."
        return Probes(reasons={name: why})

    def read() -> float:
        found = numbers(files)
        if not found:
            raise SensorError(f"{files[0]} can no longer be read.")
        return float(of(found))

    return Probes({name: read})


def _temperatures(root: Path) -> Probes:
    probes: dict[str, Probe] = {}
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        kind = "unknown"
        with suppress(OSError):
            kind = (zone / "type").read_text().strip()
        name = f"cpu_temperature_c.{zone.name.removeprefix('thermal_zone')}.{kind}"
        probes[name] = partial(_first_number, zone / "temp", str(zone / "temp"), 1e3)
    if probes:
        return Probes(probes)
    why = "This machine reports no thermal zones, like most virtual machines."
    return Probes(reasons={"cpu_temperature_c": why})


def _first_number(file: Path, name: str, divisor: float = 1.0) -> float:
    try:
        return float(file.read_text().split()[0]) / divisor
    except (OSError, ValueError, IndexError) as error:
        raise SensorError(f"{name} cannot be read ({type(error).__name__}).") from error


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


RATE_HZ = 10.0
MOST_SERIES_POINTS = 300
"""A longer series is thinned to at most this many points; least, mean and most are those of all points."""


@dataclass(frozen=True)
class TelemetryMeter(Meter):
    """Looks at every probe while requests run for `window_s`: the CPU's, and the GPU's for a job on one."""

    window_s: float = 5.0
    root: Path = ROOT

    def read(self, context: MeterContext) -> Reading:
        """Least, mean and most of each series in the facts, the series themselves in telemetry.json."""
        with _probes(context.runtime.device, self.root) as probes:
            series = Series(probes)
            with Ticker(series.look, 1 / RATE_HZ):
                requests = keep_running(context.request, self.window_s, lambda: False)
        path = context.folder / "artifacts" / f"telemetry-{new_id()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(series.document(), allow_nan=False))
        summary = series.summary() | {"requests": requests}
        return Reading(facts=MeterFacts(recorded={"telemetry": summary}), artifacts={"telemetry.json": path})

    def self_test(self, context: MeterContext) -> Comparison:
        """It looks as often as it says, and sees something. Raises UnsupportedError with what no probe could read."""
        reading = replace(self, window_s=1.0).read(context)
        (path,) = reading.artifacts.values()
        document = json.loads(path.read_text())
        known = [name for name, values in document["series"].items() if any(v is not None for v in values)]
        if not known:
            raise UnsupportedError("; ".join(document["reasons"].values()) or "No probe reads anything here.")
        looks, seconds = len(document["t_s"]) - 1, document["t_s"][-1]
        error = abs(looks / seconds / RATE_HZ - 1) if seconds else math.nan
        return Comparison(error, 0.5, "the rate of readings", f"{len(known)} series")


class Series:
    """The probes' values at each reading, null where one failed, with its first reason."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes.probes
        self._reasons = dict(probes.reasons)
        self._started_s = time.perf_counter()
        self._times_s: list[float] = []
        self._values: dict[str, list[float | None]] = {name: [] for name in self._probes}

    def look(self) -> None:
        self._times_s.append(time.perf_counter() - self._started_s)
        for name, probe in self._probes.items():
            value = None
            if name not in self._reasons:
                try:
                    value = float(probe())
                except SensorError as error:
                    self._reasons[name] = str(error)
            self._values[name].append(value)

    def summary(self) -> dict[str, Any]:
        known = {
            name: [value for value in values if value is not None] for name, values in self._values.items()
        }
        return {
            "seconds": self._times_s[-1],
            "looks": len(self._times_s),
            "series": {
                name: {"least": min(values), "mean": mean(values), "most": max(values)}
                for name, values in known.items()
                if values
            },
            "reasons": self._reasons,
        }

    def document(self) -> dict[str, Any]:
        """The series as a JSON document; `every` says that each n-th look was kept."""
        every = -(-len(self._times_s) // MOST_SERIES_POINTS)
        return {
            "rate_hz": RATE_HZ,
            "every": every,
            "t_s": self._times_s[::every],
            "series": {name: values[::every] for name, values in self._values.items()},
            "reasons": self._reasons,
        }


@contextmanager
def _probes(device: DeviceKind, root: Path) -> Iterator[Probes]:
    """The CPU's, and the GPU's on one; a GPU that cannot be opened is a reason, and the CPU's are read all the same."""
    with ExitStack() as stack:
        of_gpu = Probes()
        if device is not DeviceKind.CPU:
            try:
                require_sensors(device)
                of_gpu = gpu_probes(stack.enter_context(job_gpu()))
            except SensorError as error:
                of_gpu = Probes(reasons={"gpu": str(error)})
        yield of_gpu | cpu_probes(root)
