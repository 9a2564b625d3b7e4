"""The meters of the hardware on an NVIDIA GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.clock import EventClock
from optigpu.backends.torch.device_runtime import nvtx_range
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.hardware.gpu import job_gpu
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.energy import EnergyMeter
from optigpu.meters.gpu_utilization import GpuUtilizationMeter
from optigpu.meters.memory import MemoryMeter
from optigpu.meters.profile import ProfileMeter
from optigpu.meters.telemetry import TelemetryMeter
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Matmul
from tests.engine.tiny_models import asked, ignore

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]


def generating(folder: Path) -> MeterContext:
    """The tiny Llama of the model directory: random too, but a `path:` model, so that its energy is read."""
    runtime = asked(DecodingModel("path:llama", (), DeviceKind.CUDA, seed=0, progress=ignore), folder)
    workload = Generate(prompt_tokens=8, new_tokens=16)
    request = workload.prepare(runtime)
    request.run()
    return MeterContext(runtime, request, workload, "path:llama", folder, seed=0, quality=QualityOptions())


def multiplying(folder: Path, size: int = 8192) -> MeterContext:
    """Keeps the GPU busy for the most part."""
    runtime = TorchOperatorRuntime(DeviceKind.CUDA, seed=0)
    workload = Matmul(sizes=(size,), dtypes=("bfloat16",))
    request = workload.prepare(runtime)
    return MeterContext(runtime, request, workload, None, folder, seed=0, quality=QualityOptions())


def test_every_reading_of_the_driver_is_plausible() -> None:
    with job_gpu() as gpu:
        assert 0 < gpu.power_w() < 5000
        assert 0 < gpu.temperature_c() < 120
        assert 1e8 < gpu.sm_clock_hz() < 1e10
        assert 0 <= gpu.utilization() <= 1
        assert 0 < gpu.free_bytes() <= gpu.memory_bytes()
        assert isinstance(gpu.slowdowns(), tuple)


def test_work_draws_more_than_rest(tmp_path: Path) -> None:
    context = multiplying(tmp_path)
    reading = EnergyMeter(window_s=3).read(context)
    assert reading.reasons == {
        "j_per_token": "matmul generates no tokens",
        "j_per_image": "matmul classifies no images",
    }
    assert reading.values["energy_j"] > 0
    assert reading.values["power_w"] > reading.facts.model_dump()["energy"]["idle_w"]


def test_a_generation_has_joules_per_token(tmp_path: Path) -> None:
    reading = EnergyMeter(window_s=3).read(generating(tmp_path))
    assert reading.values["j_per_token"] == pytest.approx(reading.values["energy_j"] / 16)


def test_products_keep_the_gpu_busy(tmp_path: Path) -> None:
    assert GpuUtilizationMeter().read(multiplying(tmp_path)).values["gpu_utilization"] > 0.5


def test_telemetry_sees_the_gpu(tmp_path: Path) -> None:
    reading = TelemetryMeter(window_s=2).read(multiplying(tmp_path))
    series = json.loads(reading.artifacts["telemetry.json"].read_text())["series"]
    assert {"gpu_sm_clock_hz", "gpu_temperature_c", "gpu_power_w"} <= set(series)


def test_the_profile_counts_kernels_of_the_gpu(tmp_path: Path) -> None:
    context = generating(tmp_path)
    reading = ProfileMeter().read(context)
    assert reading.values["launches_per_step"] > 14
    profile = reading.facts.model_dump()["recorded"]["profile"]
    assert profile["unknown_share"] < 0.2
    assert not any(row["name"].startswith("aten::") for row in profile["table"])
    runtime: Any = context.runtime
    assert isinstance(runtime.decoding.clock, EventClock)


def test_a_large_product_is_compute_bound(tmp_path: Path) -> None:
    assert ProfileMeter().read(multiplying(tmp_path)).values["compute_bound_share"] > 0.9


def test_an_allocation_within_a_request_is_in_the_accelerator_s_peak(tmp_path: Path) -> None:
    import torch

    held = 256 * 2**20

    class Holding:
        def run(self) -> dict[str, float]:
            torch.empty(held, dtype=torch.uint8, device="cuda")
            return {}

    context = replace(multiplying(tmp_path, size=64), request=Holding())  # type: ignore[arg-type]
    before = torch.cuda.memory_allocated()
    values = MemoryMeter().read(context).values
    assert values["peak_bytes"] == before + held
    assert values["peak_reserved_bytes"] >= values["peak_bytes"]


def test_a_range_ends_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), nvtx_range("round", DeviceKind.CUDA):
        _ = 1 / 0
