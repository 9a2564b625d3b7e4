"""The meters, one file each: what is measured around a workload's requests.

To add one: write its file and name it in `METERS`. A new metric is named in `METRICS` of optigpu/vocabulary.py.
"""

from optigpu.meters.base import Meter
from optigpu.meters.energy import EnergyMeter
from optigpu.meters.gpu_utilization import GpuUtilizationMeter
from optigpu.meters.highest_rate import HighestRateMeter
from optigpu.meters.memory import MemoryMeter
from optigpu.meters.profile import ProfileMeter
from optigpu.meters.quality import QualityMeter
from optigpu.meters.telemetry import TelemetryMeter

METERS: dict[str, Meter] = {
    "memory": MemoryMeter(),
    "energy": EnergyMeter(),
    "quality": QualityMeter(),
    "gpu_utilization": GpuUtilizationMeter(),
    "profile": ProfileMeter(),
    "telemetry": TelemetryMeter(),
    "highest_rate": HighestRateMeter(),
}
"""The meters that have a separate pass, by name."""

METER_NAMES = ("latency", *METERS)
"""The names that a job may list. Latency has rounds instead of a pass: `optigpu.meters.latency`."""
