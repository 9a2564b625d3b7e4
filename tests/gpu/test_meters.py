"""The workloads, the meters of the hardware and the self-test on an NVIDIA GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel, PassModel
from optigpu.backends.torch.device import EventClock
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.conductor.tasks import SelfTester
from optigpu.documents.selftest import CheckStatus
from optigpu.hardware.gpu import job_gpu
from optigpu.job.spec import resolve
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.energy import EnergyMeter
from optigpu.meters.gpu_utilization import GpuUtilizationMeter
from optigpu.meters.memory import MemoryMeter
from optigpu.meters.profile import ProfileMeter
from optigpu.ops.decode.program import WEIGHT_KINDS
from optigpu.techniques.base import Technique
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import DeviceKind, Task
from optigpu.workloads.attention import Attention
from optigpu.workloads.base import Workload
from optigpu.workloads.batch_sweep import BatchSweep
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from optigpu.workloads.kv_cache import KvCachePositions
from optigpu.workloads.matmul import Matmul
from optigpu.workloads.quality import Quality
from optigpu.workloads.requests import Dtype
from tests.engine.image_models import FAMILIES as IMAGE_FAMILIES
from tests.engine.image_models import asked_to_pass
from tests.engine.rounding import in_float64, logits_of, rounding_bound, rounding_bound_of
from tests.engine.tiny_models import FAMILIES, asked, ignore, prompt

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


@pytest.mark.gpu_first
def test_every_reading_of_the_driver_is_plausible() -> None:
    with job_gpu() as gpu:
        assert 0 < gpu.power_w() < 5000
        assert 0 < gpu.temperature_c() < 120
        assert 1e8 < gpu.sm_clock_hz() < 1e10
        assert 0 <= gpu.utilization() <= 1
        assert 0 < gpu.free_bytes() <= gpu.memory_bytes()
        assert isinstance(gpu.slowdowns(), tuple)


@pytest.mark.gpu_first
def test_work_draws_more_than_rest(tmp_path: Path) -> None:
    context = multiplying(tmp_path)
    reading = EnergyMeter(window_s=3).read(context)
    assert reading.reasons == {
        "j_per_token": "matmul generates no tokens",
        "j_per_image": "matmul classifies no images",
    }
    assert reading.values["energy_j"] > 0
    assert reading.values["power_w"] > reading.facts.model_dump()["energy"]["idle_w"]


@pytest.mark.gpu_first
def test_products_keep_the_gpu_busy(tmp_path: Path) -> None:
    assert GpuUtilizationMeter().read(multiplying(tmp_path)).values["gpu_utilization"] > 0.5


def test_the_profile_counts_kernels_of_the_gpu(tmp_path: Path) -> None:
    context = generating(tmp_path)
    reading = ProfileMeter().read(context)
    assert reading.values["launches_per_step"] > 14
    profile = reading.facts.model_dump()["recorded"]["profile"]
    assert profile["unknown_share"] < 0.2
    assert not any(row["name"].startswith("aten::") for row in profile["table"])
    runtime: Any = context.runtime
    assert isinstance(runtime.decoding.clock, EventClock)


@pytest.mark.gpu_first
def test_an_allocation_within_a_request_is_in_the_accelerator_s_peak(tmp_path: Path) -> None:
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


# ---- The self-test.


@pytest.mark.timeout(1200)
def test_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    tester = SelfTester(lambda: None, lambda _: None, lambda _: None)
    (outcome,) = tester.run(tester.checks((), DeviceKind.CUDA))
    assert [(result.check.label, result.reason) for result in outcome.failed] == []
    ok = {result.check.name for result in outcome.results if result.status is CheckStatus.OK}
    assert {
        "unmodified model",
        *(f"decode_step_{kind}" for kind in WEIGHT_KINDS),
        "cuda_graphs",
        "cpu_offload",
        "native_decode",
        "profile",
    } <= ok


DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")


def passing(task: Task, model: str, *stack: Technique) -> PassModel:
    return PassModel(task, model, resolve(stack, "generate"), DeviceKind.CUDA, seed=0, progress=ignore)


def bare() -> TorchOperatorRuntime:
    return TorchOperatorRuntime(DeviceKind.CUDA, seed=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stack", [(), (StaticKvCache(),)], ids=["dynamic", "static"])
def test_prefill_gives_the_logits_of_the_prompts_last_token(
    family: str, stack: tuple[Technique, ...]
) -> None:
    runtime = passing(Task.PREFILL, f"path:{family}", *stack)
    ids = prompt().cuda()
    reference = in_float64(runtime.model)
    done = runtime.forward(ids)
    bound = rounding_bound(reference, ids, "float32")
    assert float((done.logits - logits_of(reference, ids)).abs().max()) <= bound
    assert done.seconds > 0


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_a_classifier_gives_its_logits_as_far_as_cudnns_default_rounds(family: str) -> None:
    """Float32 convolutions round to TF32 there, which has the mantissa of float16."""
    runtime = passing(Task.IMAGES, f"preset:tiny-{family}-test")
    images = torch.from_numpy(Classify(batch_size=4).prepare(asked_to_pass(runtime))._inputs).cuda()
    reference = in_float64(runtime.model)

    def exact() -> Any:
        return reference(pixel_values=images.double()).logits

    bound = rounding_bound_of(reference, exact, "float32" if family == "vit" else "float16")
    assert float((runtime.forward(images).logits - exact()).abs().max()) <= bound
    assert runtime.notes.facts.get("cudnn_tf32") == (None if family == "vit" else True)


@pytest.mark.parametrize(
    "workload",
    [
        KvCachePositions(positions=(16,), new_tokens=4, batch_size=2),
        BatchSweep(batch_sizes=(4,), prompt_tokens=8, new_tokens=4),
        Quality(window=16, batch_size=2),
    ],
    ids=lambda workload: str(workload.kind),
)
def test_what_decodes_is_timed_and_right(workload: Workload) -> None:
    runtime = asked(DecodingModel("path:llama", (), DeviceKind.CUDA, seed=0, progress=ignore))
    request = workload.prepare(runtime)
    assert request.check().problem is None
    assert all(value > 0 for value in request.run().values())
    assert request.fresh(7).check().problem is None


@pytest.mark.gpu_first
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_both_attentions_are_right(dtype: Dtype, causal: bool) -> None:
    shapes = Attention(lengths=(7, 512, 2048), heads=8, head_size=64, causal=causal, dtype=dtype)
    for workload in shapes.expand():
        assert workload.prepare(bare()).check().problem is None, workload.label
