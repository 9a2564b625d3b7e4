"""The workloads on an NVIDIA GPU: right outputs, real kernels, real peaks."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.backends.torch.passes import PassModel
from optigpu.job.spec import resolve
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.memory import MemoryMeter
from optigpu.techniques.base import Technique
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.vocabulary import DeviceKind, Task
from optigpu.workloads.attention import Attention
from optigpu.workloads.base import Workload
from optigpu.workloads.batch_sweep import BatchSweep
from optigpu.workloads.classify import Classify
from optigpu.workloads.kv_cache import KvCachePositions
from optigpu.workloads.normalization import Normalization
from optigpu.workloads.prefill import Prefill
from optigpu.workloads.quality import Quality
from optigpu.workloads.requests.operators import Dtype
from tests.engine.image_models import FAMILIES as IMAGE_FAMILIES
from tests.engine.image_models import asked_to_pass
from tests.engine.rounding import in_float64, logits_of, rounding_bound, rounding_bound_of
from tests.engine.tiny_models import FAMILIES, asked, ignore, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]
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
    import torch

    runtime = passing(Task.IMAGES, f"preset:tiny-{family}-test")
    images = torch.from_numpy(Classify(batch_size=4).prepare(asked_to_pass(runtime))._inputs).cuda()
    reference = in_float64(runtime.model)

    def exact() -> Any:
        return reference(pixel_values=images.double()).logits

    bound = rounding_bound_of(reference, exact, "float32" if family == "vit" else "float16")
    assert float((runtime.forward(images).logits - exact()).abs().max()) <= bound
    assert runtime.notes.facts.get("cudnn_tf32") == (None if family == "vit" else True)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
@pytest.mark.parametrize("technique", [Bf16(), Fp16()], ids=lambda technique: str(technique.name))
def test_a_classifier_runs_in_sixteen_bits(family: str, technique: Technique) -> None:
    request = Classify(batch_size=4).prepare(
        asked_to_pass(passing(Task.IMAGES, f"preset:tiny-{family}-test", technique))
    )
    assert request.check().problem is None
    assert request.run()["images_per_s"] > 0


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


def test_a_prompt_is_timed_and_right() -> None:
    request = Prefill(prompt_tokens=16, batch_size=2).prepare(
        asked_to_pass(passing(Task.PREFILL, "path:qwen2", Bf16()))
    )
    assert request.check().problem is None
    assert request.run()["ttft_s"] > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_both_attentions_are_right(dtype: Dtype, causal: bool) -> None:
    shapes = Attention(lengths=(7, 512, 2048), heads=8, head_size=64, causal=causal, dtype=dtype)
    for workload in shapes.expand():
        assert workload.prepare(bare()).check().problem is None, workload.label


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_heads_in_groups_are_right_in_sixteen_bits(dtype: Dtype) -> None:
    for workload in Attention(lengths=(512,), heads=8, kv_heads=2, dtype=dtype).expand():
        assert workload.prepare(bare()).check().problem is None, workload.label


def test_fused_attention_runs_no_softmax_of_its_own() -> None:
    for dtype in DTYPES:
        runtime = bare()
        (workload,) = Attention(lengths=(512,), implementations=("fused",), dtype=dtype).expand()
        workload.prepare(runtime).observe()
        kernels = runtime.notes.facts["attention_kernels"]
        assert kernels
        assert not any("softmax" in name.lower() and "scaled_dot" not in name for name in kernels)
        assert "aten::_scaled_dot_product_attention_math" not in kernels


def test_standard_attention_takes_memory_with_the_square_of_the_length(tmp_path: Path) -> None:
    def peak(implementation: Any, length: int) -> float:
        (workload,) = Attention(
            lengths=(length,), implementations=(implementation,), dtype="bfloat16"
        ).expand()
        runtime = bare()
        context = MeterContext(
            runtime, workload.prepare(runtime), workload, None, tmp_path, 0, QualityOptions()
        )
        return MemoryMeter().read(context).values["peak_bytes"]

    assert peak("standard", 4096) / peak("standard", 1024) > 8
    assert peak("fused", 4096) < peak("standard", 4096) / 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_norm_is_right(dtype: Dtype) -> None:
    for workload in Normalization(rows=257, widths=(77, 4096), dtype=dtype).expand():
        request = workload.prepare(bare())
        assert request.check().problem is None, workload.label
        assert request.run()["gb_per_s"] > 0
