"""energy: joules of a request above the idle device, from the device's own counter over a window of whole requests."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from optigpu.documents.facts import EnergyFacts, MeterFacts
from optigpu.hardware.cgroup import ROOT
from optigpu.hardware.energy import Energy, EnergySensor, cpu_energy, gpu_energy
from optigpu.hardware.gpu import job_gpu
from optigpu.hardware.sensors import SensorError, Ticker
from optigpu.meters.base import MeterContext, Reading, keep_running
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload

_PERIOD_S = 0.05
"""Twice as often as integrated power needs."""


@dataclass(frozen=True)
class EnergyMeter:
    """Rests, reads the idle power, then runs requests for `window_s` at least.

    A job on a CPU counts the CPU alone and a job on a GPU the GPU alone: each is what the technique runs on, and the
    two together would compare hosts. Idle is this process at rest with its model loaded, so that what is left is the
    energy of the work. `root` is the root of the file system.
    """

    once: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ("energy_j", "j_per_token", "j_per_image", "power_w")

    rest_s: float = 1.0
    idle_s: float = 2.0
    window_s: float = 10.0
    root: Path = ROOT

    def read(self, context: MeterContext) -> Reading:
        """Joules per request, token and image above idle, and mean watts; one reason for all where nothing counts."""
        if context.model is not None and parse_reference(context.model).kind == "preset":
            return self._none(
                f"The weights of {context.model} are random, and what a chip draws depends on the values; measure the "
                "energy of a trained model."
            )
        try:
            with _sensor(context.runtime.device, self.root) as sensor:
                return self._measured(context, sensor)
        except SensorError as error:
            return self._none(str(error))

    def _none(self, why: str) -> Reading:
        return Reading(reasons=dict.fromkeys(self.metrics, why))

    def _measured(self, context: MeterContext, sensor: EnergySensor) -> Reading:
        time.sleep(self.rest_s)
        idle, _ = _flow(sensor, lambda _: time.sleep(self.idle_s))
        context.request.run()  # the clocks rise again
        window, requests = _flow(
            sensor, lambda ticker: keep_running(context.request, self.window_s, lambda: ticker.failed)
        )
        above_j = (window.joules - idle.watts * window.seconds) / requests
        energy = EnergyFacts(
            source=sensor.source,
            scope=sensor.scope,
            resolution_j=sensor.resolution_j,
            looks=window.looks,
            changes=window.changes,
            window_s=window.seconds,
            requests=requests,
            idle_w=idle.watts,
            idle_s=idle.seconds,
        )
        values, reasons = _values(above_j, context.workload)
        return Reading(values | {"power_w": window.watts}, reasons, MeterFacts(energy=energy))


def _values(above_j: float, workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
    counts = {
        "j_per_token": (workload.generated_tokens, "generates no tokens"),
        "j_per_image": (workload.classified_images, "classifies no images"),
    }
    meaningless = {name: f"{workload.kind} {why}" for name, (count, why) in counts.items() if not count}
    if above_j <= 0:
        why = "The requests drew no more than the idle device; make them longer or the machine quieter."
        return {}, dict.fromkeys(("energy_j", *counts), why) | meaningless
    shares = {name: above_j / count for name, (count, _) in counts.items() if count}
    return {"energy_j": above_j} | shares, meaningless


def _flow(sensor: EnergySensor, work: Callable[[Ticker], Any]) -> tuple[Energy, Any]:
    """What flows while `work` is done, and what it returns. Raises SensorError when the sensor fails meanwhile."""
    sensor.look()
    start = sensor.total
    with Ticker(sensor.look, _PERIOD_S) as ticker:
        done = work(ticker)
    flowed = sensor.since(start)
    if not flowed.changes:
        raise SensorError(
            f"{sensor.source}: the counter did not change for {flowed.seconds:.1f} s, so there is no energy to report."
        )
    if flowed.looks < sensor.least_hz * flowed.seconds:
        raise SensorError(
            f"{sensor.source}: it was read {flowed.looks / flowed.seconds:.1f} times a second, and "
            f"{sensor.least_hz:.0f} are needed; make the machine quieter."
        )
    return flowed, done


@contextmanager
def _sensor(device: DeviceKind, root: Path) -> Iterator[EnergySensor]:
    if device is DeviceKind.CPU:
        yield cpu_energy(root)
        return
    with job_gpu() as gpu:
        yield gpu_energy(gpu)
