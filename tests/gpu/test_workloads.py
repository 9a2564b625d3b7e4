"""The workloads on an NVIDIA GPU: right outputs, real kernels, real peaks."""

from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.backends.torch.passes import PassModel
from optigpu.job.spec import resolve
from optigpu.techniques.base import Technique
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import DeviceKind, Task
from optigpu.workloads.attention import Attention
from optigpu.workloads.base import Workload
from optigpu.workloads.batch_sweep import BatchSweep
from optigpu.workloads.classify import Classify
from optigpu.workloads.kv_cache import KvCachePositions
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
