"""python -m tests.drivers.questions QUESTION: asks the driver library that is found, and prints the answer as JSON."""

import ctypes
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from optigpu.backends.runtime import Runtime
from optigpu.hardware.gpu import Driver, gpus, job_gpu
from optigpu.hardware.sensors import SensorError
from optigpu.meters.base import Meter, MeterContext, QualityOptions, Reading
from optigpu.meters.energy import EnergyMeter
from optigpu.meters.gpu_utilization import GpuUtilizationMeter
from optigpu.meters.telemetry import TelemetryMeter
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Request
from optigpu.workloads.generate import Generate

REQUEST_J = 3.0
OF_A_SLICE = ("uuid", "name", "memory_bytes", "compute_capability", "sm_clock_hz", "energy_j")


class Burn:
    """A request that takes 3 J from the made-up GPU in some 10 ms."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._library.burn.argtypes = [ctypes.c_double]
        self.runs = 0

    def run(self) -> Mapping[str, float]:
        time.sleep(0.01)
        self._library.burn(REQUEST_J * 1e3)
        self.runs += 1
        return {}


METERS: dict[str, Meter] = {
    "energy": EnergyMeter(rest_s=0, idle_s=0.3, window_s=1, longest_s=3),
    "gpu_utilization": GpuUtilizationMeter(lead_s=0.2, window_s=0.5),
    "telemetry": TelemetryMeter(window_s=1),
}


def metered(name: str) -> dict[str, Any]:
    """What a meter reads of a job on the GPU whose requests are `Burn`."""
    request = Burn()
    context = MeterContext(
        runtime=cast(Runtime, SimpleNamespace(device=DeviceKind.CUDA)),
        request=cast(Request, request),
        workload=Generate(new_tokens=5, batch_size=2),
        model="path:trained",
        folder=Path(tempfile.mkdtemp()),
        seed=0,
        quality=QualityOptions(),
    )
    reading: Reading = METERS[name].read(context)
    artifacts = {kept: json.loads(path.read_text()) for kept, path in reading.artifacts.items()}
    threads = [thread.name for thread in threading.enumerate()]
    return vars(reading) | {
        "facts": reading.facts.model_dump(),
        "artifacts": artifacts,
        "runs": request.runs,
        "threads": threads,
    }


def readings() -> dict[str, Any]:
    """Every reading of the first GPU, or the sentence that says why there is none."""
    try:
        with Driver() as driver:
            (gpu,) = driver.gpus()
            names = [name for name in dir(gpu) if not name.startswith("_") and name != "parts"]
            return {name: _said(getattr(gpu, name)) for name in names}
    except SensorError as error:
        return {"error": str(error)}


def which() -> dict[str, Any]:
    """The GPU that a job would run on, and what the probe of this machine says."""
    try:
        with job_gpu() as gpu:
            return {"uuid": gpu.uuid(), "visible": len(gpus().visible)}
    except SensorError as error:
        return {"error": str(error), "visible": len(gpus().visible)}


def slices() -> list[dict[str, Any]]:
    """What the slices of the GPU tell of themselves, and of the one that a job runs on."""
    with Driver() as driver:
        told = [{name: _said(getattr(gpu, name)) for name in OF_A_SLICE} for gpu in driver.gpus()]
    with job_gpu() as gpu:
        return [*told, {name: _said(getattr(gpu, name)) for name in OF_A_SLICE}]


def _said(reading: Any) -> Any:
    try:
        return reading()
    except SensorError as error:
        return str(error)


if __name__ == "__main__":
    question = sys.argv[1]
    answers = {"readings": readings, "which": which, "slices": slices}
    answer = answers[question]() if question in answers else metered(question)
    print(json.dumps(answer))
