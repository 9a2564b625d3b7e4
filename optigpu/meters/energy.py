"""energy: joules of a request above idle, from the device's own counter or a wall meter over many requests.

Counters move in steps: those of NVML every 20 to 100 ms, some wall meters every 10 s. So power is what was counted from
one step to another, divided by the time between them, and a window lasts until there were enough steps.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, TypeVar, cast

from optigpu.backends.runtime import RemoteRuntime
from optigpu.backends.training import TrainingRuntime
from optigpu.documents.facts import EnergyFacts, MeterFacts
from optigpu.documents.selftest import Comparison
from optigpu.hardware.cgroup import ROOT
from optigpu.hardware.energy import Energy, cpu_energy, gpu_energy, kernel_energy
from optigpu.hardware.gpu import job_gpu
from optigpu.hardware.sensors import SensorError, Ticker
from optigpu.hardware.wall_meter import CountingSensor, WallSensor, between_changes, wall_source
from optigpu.meters.base import Meter, MeterContext, Reading, keep_running, require_read
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import DeviceKind, Task

LEAST_CHANGES = 10
"""A counter must change at least so often in a window: then its steps blur the window's ends by less than a tenth."""

GAUGE_S, GAUGE_PERIOD_S = 2.0, 0.05
"""Of the self-test."""
_REST_S = 0.02
"""Between two questions whether the rest is over."""

T = TypeVar("T")


@dataclass(frozen=True)
class EnergyMeter(Meter):
    """Rests, reads the idle power, then runs requests for `window_s` at least.

    A job on a CPU counts the CPU alone and a job on a GPU the GPU alone: each is what the technique runs on, and the
    two together would compare hosts. Where the environment names a wall meter, that one counts. Idle is this process
    at rest with its model loaded, so that what is left is the energy of the work. Both windows are lengthened to
    `longest_s` at most for a counter that changes seldom. `root` is the root of the file system.
    """

    metrics: ClassVar[tuple[str, ...]] = (
        "energy_j",
        "j_per_token",
        "j_per_image",
        "j_per_1000_tokens",
        "power_w",
    )

    rest_s: float = 1.0
    idle_s: float = 2.0
    window_s: float = 10.0
    longest_s: float = 120.0
    root: Path = ROOT

    def read(self, context: MeterContext) -> Reading:
        """Joules per request, token, image and 1,000 learned tokens above idle, and mean watts; one reason for all
        where nothing counts."""
        model, trains = context.model, context.workload.task is Task.TRAINING
        if model is not None and not trains and parse_reference(model).kind == "preset":
            return self.none(
                f"The weights of {context.model} are random, and what a chip draws depends on the values; measure the "
                "energy of a trained model."
            )
        if isinstance(context.runtime, RemoteRuntime) and context.runtime.elsewhere:
            return self.none(context.runtime.elsewhere)
        try:
            with _sensor(context.runtime.device, self.root) as sensor:
                return self._measured(context, sensor)
        except SensorError as error:
            return self.none(str(error))

    def self_test(self, context: MeterContext) -> Comparison:
        """Short windows: the power of requests beside the driver's own gauge on a GPU, and elsewhere idle power."""
        quick = replace(self, rest_s=0.2, idle_s=1.0, window_s=2.0, longest_s=30.0)
        reading = quick.read(context)
        require_read(reading, "power_w")
        power_w, energy = reading.values["power_w"], reading.facts.energy
        gauge_w = _gauge_w(context) if context.runtime.device is DeviceKind.CUDA else None
        if gauge_w is not None and wall_source() is None:
            return Comparison(abs(power_w - gauge_w) / gauge_w, 0.5, "the power that the driver reports")
        how = energy.source if energy else ""
        idle_w = energy.idle_w if energy else math.nan
        return Comparison(idle_w / power_w, 1.25, "the power while requests run", how)

    def _measured(self, context: MeterContext, sensor: CountingSensor) -> Reading:
        time.sleep(self.rest_s)
        idle = Window(sensor, self.idle_s, self.longest_s)

        def rest(over: Callable[[], bool]) -> None:
            while not over():
                time.sleep(_REST_S)

        idle.watch(rest)
        context.request.run()  # the clocks rise again
        window = Window(sensor, self.window_s, self.longest_s)
        requests = window.watch(lambda over: keep_running(context.request, math.inf, over))
        above_j = (window.energy.watts - idle.energy.watts) * window.seconds / requests
        energy = EnergyFacts(
            source=sensor.source,
            scope=sensor.scope,
            resolution_j=sensor.resolution_j,
            looks=window.looks,
            changes=window.energy.changes,
            update_period_s=window.update_period_s,
            window_s=window.seconds,
            requests=requests,
            idle_w=idle.energy.watts,
            idle_s=idle.seconds,
        )
        values, reasons = _values(above_j, context)
        return Reading(values | {"power_w": window.energy.watts}, reasons, MeterFacts(energy=energy))


def _gauge_w(context: MeterContext) -> float | None:
    """Mean power while requests run for GAUGE_S, as the driver reports it; None if it does not."""
    samples: list[float] = []
    try:
        with job_gpu() as gpu, Ticker(lambda: samples.append(gpu.power_w()), GAUGE_PERIOD_S):
            keep_running(context.request, GAUGE_S, lambda: False)
    except SensorError:
        return None
    return statistics.mean(samples) if samples else None


def _values(above_j: float, context: MeterContext) -> tuple[dict[str, float], dict[str, str]]:
    workload = context.workload
    tokens, images = None, None
    if workload.task is Task.TRAINING:
        facts = cast(TrainingRuntime, context.runtime).facts
        tokens, images = workload.trained_tokens(facts), workload.trained_images(facts)
    counts = {
        "j_per_token": (workload.generated_tokens, "generates no tokens"),
        "j_per_image": (workload.classified_images or images, "classifies no images"),
        "j_per_1000_tokens": (tokens and tokens / 1000, "learns no tokens"),
    }
    meaningless = {name: f"{workload.kind} {why}" for name, (count, why) in counts.items() if not count}
    if above_j <= 0:
        why = "The requests drew no more than the idle device; make them longer or the machine quieter."
        return {}, dict.fromkeys(("energy_j", *counts), why) | meaningless
    shares = {name: above_j / count for name, (count, _) in counts.items() if count}
    return {"energy_j": above_j} | shares, meaningless


class Window:
    """A sensor is read for `least_s`, and on until it has changed often enough. After `watch`, `energy` is what flowed
    from the first change to the last, `seconds` how long it all lasted."""

    energy: Energy
    seconds: float
    looks: int
    update_period_s: float

    def __init__(self, sensor: CountingSensor, least_s: float, longest_s: float) -> None:
        self._sensor, self._least_s, self._longest_s = sensor, least_s, longest_s
        self._from_s = sensor.from_now_s()
        self._began_s = time.perf_counter()

    def watch(self, work: Callable[[Callable[[], bool]], T]) -> T:
        """The result of `work`, which is given what tells it to end. Raises SensorError if the sensor fails."""
        looks = self._sensor.looks
        with Ticker(self._sensor.look, self._sensor.period_s) as ticker:
            done = work(lambda: ticker.failed or self._is_over())
            self.seconds = time.perf_counter() - self._began_s
        self.looks = self._sensor.looks - looks
        self.energy = between_changes(self._sensor, self._from_s)
        stopped = self._sensor.stopped()
        if stopped or self.energy.changes < LEAST_CHANGES:
            raise SensorError(stopped or self._sensor.why_few(self.energy.changes, self.seconds))
        if self.looks < self._sensor.least_hz * self.seconds:
            raise SensorError(
                f"{self._sensor.source}: read only {self.looks / self.seconds:.1f} times a second, and "
                f"{self._sensor.least_hz:.0f} are needed; make the machine quieter."
            )
        moments = [change.at_s for change in self._sensor.changes[-self.energy.changes :]]
        self.update_period_s = statistics.median(later - earlier for earlier, later in pairwise(moments))
        return done

    def _is_over(self) -> bool:
        """A counter that changes so seldom that the longest window would be too short is not waited for."""
        lasted_s = time.perf_counter() - self._began_s
        if lasted_s < self._least_s:
            return False
        changes = between_changes(self._sensor, self._from_s).changes
        return changes >= LEAST_CHANGES or changes < int(LEAST_CHANGES * lasted_s / self._longest_s)


@contextmanager
def _sensor(device: DeviceKind, root: Path) -> Iterator[CountingSensor]:
    wall = wall_source()
    if wall is not None:
        yield WallSensor(wall)
    elif device is DeviceKind.CPU:
        yield cpu_energy(root)
    elif device is not DeviceKind.CUDA:
        yield kernel_energy(device, root)
    else:
        with job_gpu() as gpu:
            yield gpu_energy(gpu)
