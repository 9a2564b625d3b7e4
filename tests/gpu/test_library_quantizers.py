"""llm_int8, nf4 and the layers of ready GPTQ and AWQ checkpoints on an NVIDIA GPU."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.models.loading.footprint import weight_bytes
from optigpu.surgery.places import weight_of
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.cuda_graphs import CudaGraphs
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.awq import Awq
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.gptq import Gptq
from optigpu.techniques.quantization.llm_int8 import LlmInt8
from optigpu.techniques.quantization.nf4 import Nf4
from tests.engine.bitsandbytes_weights import (
    activation_bound,
    dequantized,
    replaced_in,
    rounded_to_int8,
    twins,
)
from tests.engine.decoded import NEW_TOKENS, assert_right, assert_right_within
from tests.engine.packed_models import Layout, write_packed_tiny
from tests.engine.rounding import (
    in_float64,
    rounding_bound,
)
from tests.engine.tiny_models import FAMILIES, prompt, runtime_of
from tests.gpu.cuda_models import on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]
OTHERS = [(None, "float32"), (Bf16(), "bfloat16"), (Fp16(), "float16")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("other", "dtype"), OTHERS, ids=["alone", "bf16", "fp16"])
@pytest.mark.parametrize("double", [True, False])
def test_nf4_decodes_as_its_weights_and_rounding_allow(
    family: str, other: Technique | None, dtype: str, double: bool
) -> None:
    others = [other] if other else []
    runtime = on_cuda(f"path:{family}", Nf4(double_quantization=double), *others)
    assert runtime.notes.facts["nf4_fused_layers"] == 0
    reference = in_float64(on_cuda(f"path:{family}", *others).model)
    for layer, quantized in twins(reference, runtime.model):
        weight_of(layer).copy_(dequantized(quantized.cpu()))
        quantized.cuda()
    assert_right(runtime, reference, dtype, prompt().cuda())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("other", "dtype"), OTHERS, ids=["alone", "bf16", "fp16"])
@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_int8_decodes_as_its_weights_and_rounding_allow(
    family: str, other: Technique | None, dtype: str, threshold: float
) -> None:
    others = [other] if other else []
    reference = in_float64(on_cuda(f"path:{family}", *others).model)
    for layer in replaced_in(reference):
        weight_of(layer).copy_(rounded_to_int8(weight_of(layer)))
    runtime = on_cuda(f"path:{family}", LlmInt8(threshold=threshold), *others)

    def bound(tokens: Any) -> float:
        products = rounding_bound(
            reference, tokens, "float16"
        )  # the library's int8 products come out in float16
        return max(products, rounding_bound(reference, tokens, dtype)) + activation_bound(
            reference, tokens, threshold
        )

    assert_right_within(runtime, reference, bound, prompt().cuda())


@pytest.mark.parametrize("technique", [LlmInt8(), Nf4(), Nf4(double_quantization=False)])
def test_it_weighs_on_the_gpu_what_it_weighs_on_the_host(technique: Technique) -> None:
    assert weight_bytes(on_cuda("path:llama", technique).model) == weight_bytes(
        runtime_of("path:llama", technique).model
    )


@pytest.mark.parametrize("technique", [LlmInt8(), Nf4()], ids=["llm_int8", "nf4"])
def test_a_compiled_step_gives_the_plain_one_s_tokens(technique: Technique) -> None:
    prompts = prompt().cuda()
    plain = on_cuda("path:llama", technique, Fp16()).generate(prompts, NEW_TOKENS).tokens
    compiled = on_cuda("path:llama", technique, Fp16(), TorchCompile())
    assert compiled.generate(prompts, NEW_TOKENS).tokens.equal(plain)


def test_nf4_can_be_recorded_as_a_cuda_graph() -> None:
    prompts = prompt().cuda()
    plain = on_cuda("path:llama", Nf4(), Fp16()).generate(prompts, NEW_TOKENS).tokens
    recorded = on_cuda("path:llama", Nf4(), Fp16(), CudaGraphs())
    assert recorded.generate(prompts, NEW_TOKENS).tokens.equal(plain)


@pytest.mark.parametrize(
    ("technique", "layout"), [(Gptq(), Layout()), (Awq(), Layout("awq"))], ids=["gptq", "awq"]
)
@pytest.mark.parametrize(("other", "dtype"), OTHERS, ids=["alone", "bf16", "fp16"])
def test_a_packed_checkpoint_decodes_as_its_weights_and_rounding_allow(
    technique: Technique, layout: Layout, other: Technique | None, dtype: str, models_dir: Path
) -> None:
    name = f"packed/cuda-{technique.name}-{dtype}"
    reference = write_packed_tiny(models_dir / name, "llama", layout).cuda()
    runtime = on_cuda(f"path:{name}", technique, *([other] if other else []))
    assert_right(runtime, reference, dtype, prompt().cuda())
