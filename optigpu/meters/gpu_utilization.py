"""gpu_utilization: the share of time in which a kernel ran on the GPU, as the driver samples it."""

from dataclasses import dataclass, replace
from statistics import mean
from typing import ClassVar

from optigpu.documents.facts import MeterFacts
from optigpu.documents.selftest import Comparison
from optigpu.hardware.gpu import job_gpu, require_sensors
from optigpu.hardware.sensors import SensorError, Ticker
from optigpu.meters.base import Meter, MeterContext, Reading, keep_running, require_read
from optigpu.vocabulary import DeviceKind, ReplicateError

_PERIOD_S = 0.1


@dataclass(frozen=True)
class GpuUtilizationMeter(Meter):
    """Samples while requests run for `window_s`, after `lead_s`, since a sample tells of up to a second before it."""

    metrics: ClassVar[tuple[str, ...]] = ("gpu_utilization",)

    lead_s: float = 1.0
    window_s: float = 3.0

    def read(self, context: MeterContext) -> Reading:
        """The mean, 0 to 1. A kernel that fills a corner of the GPU counts like one that fills it."""
        if context.runtime.device is DeviceKind.CPU:
            return self.none("This job runs on a CPU; only a job on a GPU has a GPU's utilization.")
        try:
            require_sensors(context.runtime.device)
            with job_gpu() as gpu:
                samples = [gpu.utilization()]  # a GPU that does not tell is found before a request is run
                keep_running(context.request, self.lead_s, lambda: False)
                samples.clear()
                with Ticker(lambda: samples.append(gpu.utilization()), _PERIOD_S) as ticker:
                    requests = keep_running(context.request, self.window_s, lambda: ticker.failed)
        except SensorError as error:
            return self.none(str(error))
        how = {"samples": len(samples), "requests": requests, "least": min(samples), "most": max(samples)}
        facts = MeterFacts(recorded={"gpu_utilization": how})
        return Reading({"gpu_utilization": mean(samples)}, facts=facts)

    def self_test(self, context: MeterContext) -> Comparison:
        """A share, and some of it while requests run. Raises ReplicateError where the driver sees no kernel."""
        reading = replace(self, lead_s=1.0, window_s=1.0).read(context)
        require_read(reading, "gpu_utilization")
        share = reading.values["gpu_utilization"]
        if share == 0:
            raise ReplicateError("The driver reports that no kernel ran while requests did.")
        return Comparison(max(0.0, share - 1, -share), 0.0, "the share of time", f"{share:.0%} busy")
