"""The torch backend on an NVIDIA GPU."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch.clock import EventClock
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.conductor.proof import prove
from optigpu.meters import METERS
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Dtype, Matmul
from tests.engine.decoded import NEW_TOKENS, assert_tokens_right
from tests.engine.rounding import (
    in_float64,
)
from tests.engine.tiny_models import FAMILIES, asked, prompt
from tests.gpu.cuda_models import on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]


def test_the_clock_measures_what_the_device_does() -> None:
    import torch

    clock = EventClock(DeviceKind.CUDA)
    x = torch.randn(4096, 4096, device="cuda")
    marks = [clock.mark()]
    for products in (1, 20):
        for _ in range(products):
            x @ x
        marks.append(clock.mark())
    short, long = clock.seconds(marks)
    assert 0 < short < long


@pytest.mark.parametrize("technique", [None, Bf16(), Fp16()], ids=["fp32", "bf16", "fp16"])
def test_a_preset_is_made_on_the_device_in_its_dtype(technique: Technique | None) -> None:
    runtime = on_cuda("preset:tiny-llama-test", *([technique] if technique else []))
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[technique.name] if technique else "float32"
    kinds = {(parameter.device.type, str(parameter.dtype)) for parameter in runtime.model.parameters()}
    assert kinds == {("cuda", f"torch.{dtype}")}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_greedy_tokens_are_right_with_and_without_cuda_graphs(family: str, mode: Any) -> None:
    runtime = on_cuda(f"path:{family}", *([TorchCompile(mode=mode)] if mode else []))
    prompts = prompt().cuda()
    first = runtime.generate(prompts, NEW_TOKENS)
    again = [runtime.generate(prompts, NEW_TOKENS).tokens for _ in range(3)]
    assert all(tokens.equal(first.tokens) for tokens in again)
    assert all(gap > 0 for gap in first.gaps_s)
    assert_tokens_right(runtime, in_float64(runtime.model), prompts, first.tokens)
    if mode:
        assert runtime.notes.facts["compiled_graphs"] == 1


@pytest.mark.parametrize("other", [None, Bf16(), Fp16()], ids=["fp32", "bf16", "fp16"])
def test_compiled_int8_gives_the_tokens_of_plain_int8(other: Technique | None) -> None:
    others = [other] if other else []
    prompts = prompt().cuda()
    plain = on_cuda("path:llama", Int8WeightOnly(), *others).generate(prompts, NEW_TOKENS).tokens
    compiled = on_cuda("path:llama", Int8WeightOnly(), TorchCompile(mode="reduce-overhead"), *others)
    assert compiled.generate(prompts, NEW_TOKENS).tokens.equal(plain)


def test_the_memory_meter_reads_the_accelerators_peaks(tmp_path: Path) -> None:
    runtime = asked(on_cuda("preset:tiny-llama-test"), tmp_path)
    workload = Generate(prompt_tokens=8, new_tokens=4)
    context = MeterContext(
        runtime, workload.prepare(runtime), workload, "preset:tiny-llama-test", tmp_path, 0, QualityOptions()
    )
    reading = METERS["memory"].read(context)
    assert reading.reasons == {}
    assert (
        reading.values["weight_bytes"] < reading.values["peak_bytes"] <= reading.values["peak_reserved_bytes"]
    )


@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16", "bfloat16"])
def test_a_product_is_right_in_every_dtype(dtype: Dtype) -> None:
    request = Matmul(sizes=(512,), dtypes=(dtype,)).prepare(TorchOperatorRuntime(DeviceKind.CUDA, seed=0))
    assert request.check().problem is None
    assert request.run()["tflops"] > 0


def test_the_gpu_proves_that_it_works() -> None:
    prove(DeviceKind.CUDA, cancelled=lambda: None)
