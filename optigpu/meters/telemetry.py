"""telemetry: clocks, temperatures, power, throttling and load at 10 Hz while requests run."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from optigpu.documents.facts import MeterFacts
from optigpu.documents.selftest import Comparison
from optigpu.hardware.cgroup import ROOT
from optigpu.hardware.gpu import job_gpu, require_sensors
from optigpu.hardware.sensors import SensorError, Ticker
from optigpu.hardware.telemetry import Probe, Probes, cpu_probes, gpu_probes
from optigpu.meters.base import MeterContext, Reading, keep_running
from optigpu.vocabulary import DeviceKind, UnsupportedError, new_id

RATE_HZ = 10.0
MOST_SERIES_POINTS = 300
"""A longer series is thinned to at most this many points; least, mean and most are those of all points."""


@dataclass(frozen=True)
class TelemetryMeter:
    """Looks at every probe while requests run for `window_s`: the CPU's, and the GPU's for a job on one."""

    once: ClassVar[bool] = False
    timed: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()

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
        """Asks each probe once; one that fails is null from then on."""
        self._times_s.append(time.perf_counter() - self._started_s)
        for name, probe in self._probes.items():
            self._values[name].append(self._asked(name, probe))

    def summary(self) -> dict[str, Any]:
        """Duration and number of readings, and the least, mean and most of each series."""
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

    def _asked(self, name: str, probe: Probe) -> float | None:
        if name in self._reasons:
            return None
        try:
            return float(probe())
        except SensorError as error:
            self._reasons[name] = str(error)
            return None


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
