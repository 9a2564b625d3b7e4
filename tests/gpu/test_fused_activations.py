"""The fused activations and the merged matrices on an NVIDIA GPU."""

from typing import Any

import pytest
import torch

from optigpu.ops.activation.fused_activation import Approximation, activation_backend, bias_gelu, swiglu
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.fused_gelu import FusedGelu
from optigpu.techniques.kernels.fused_qkv import FusedQkv
from optigpu.techniques.kernels.fused_swiglu import FusedSwiglu
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from tests.engine.decoded import NEW_TOKENS
from tests.engine.rounding import (
    assert_greedy_as_far_as_it_can_be_told,
    in_float64,
    logits_of,
    rounding_bound,
)
from tests.engine.test_ops_fused_activation import (
    SHAPES,
    UNIT,
    assert_within,
    exact_gelu,
    exact_swiglu,
    normal,
    summed,
)
from tests.engine.tiny_models import prompt
from tests.gpu.cuda_models import on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("biased_models")]
DTYPES = ["float32", "bfloat16", "float16"]
FUSED: dict[str, list[Technique]] = {
    "gpt2": [FusedGelu()],
    "opt-gelu": [FusedGelu(), FusedQkv()],
    "llama": [FusedSwiglu(), FusedQkv()],
    "mistral": [FusedSwiglu(), FusedQkv()],
    "qwen2": [FusedSwiglu(), FusedQkv()],
}
EXTRA = 4
"""exp and the division of a GPU are off by a few units more than those of a CPU (CUDA C++ Programming Guide,
Mathematical Functions)."""


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_triton_kernels_agree_with_float64(shape: tuple[int, ...], name: str) -> None:
    assert activation_backend("cuda") == "triton"
    dtype = getattr(torch, name)
    x, pairs = normal(*shape, dtype=dtype), normal(*shape[:-1], 2 * shape[-1], dtype=dtype)
    for given in (True, False):
        bias, two = (normal(row.shape[-1], dtype=dtype, seed=1) if given else None for row in (x, pairs))
        on_gpu = [None if tensor is None else tensor.cuda() for tensor in (bias, two)]
        forms: tuple[Approximation, ...] = ("none", "tanh")
        for form in forms:
            v = summed(x, bias)
            exact, _ = exact_gelu(v, form)
            y = bias_gelu(x.cuda(), on_gpu[0], form)
            assert y.dtype == dtype
            # erf's tail is what is left of a difference from one.
            assert_within(y.cpu(), (exact, EXTRA * UNIT * v.double().abs()))
        exact, arithmetic = exact_swiglu(summed(pairs, two))
        y = swiglu(pairs.cuda(), on_gpu[1])
        assert y.dtype == dtype
        # The argument of exp is rounded when it is made a power of two: by up to |gate| units.
        gate = summed(pairs, two).double().chunk(2, dim=-1)[0].abs()
        assert_within(y.cpu(), (exact, arithmetic + (EXTRA + gate) * UNIT * exact.abs()))


@pytest.mark.gpu_first
def test_more_elements_than_32_bits_count() -> None:
    """A bfloat16 activation of 2^31 + 2^20 elements, 4 GiB: its last row is where it must be."""
    columns = 2**20
    x = torch.zeros((2**11 + 1, columns), dtype=torch.bfloat16, device="cuda")
    x[-1] = 2.0
    assert torch.equal(bias_gelu(x)[-1], bias_gelu(x[-1]))
    assert torch.equal(swiglu(x)[-1], swiglu(x[-1]))
    del x
    torch.cuda.empty_cache()


def test_torch_compile_looks_into_the_kernels() -> None:
    """So that nothing of the dispatcher is left between them in a compiled step."""
    from torch._inductor.utils import run_and_get_code

    x, bias = normal(4, 96).cuda(), normal(96, seed=1).cuda()

    def step(x: Any, bias: Any) -> Any:
        return bias_gelu(torch.relu(x), bias, "tanh")[..., :48] + swiglu(x, bias)

    assert activation_backend("cuda") == "triton"
    with torch.inference_mode():
        compiled, sources = run_and_get_code(torch.compile(step, fullgraph=True), x, bias)
        torch.testing.assert_close(compiled, step(x, bias))
    assert "def _bias_gelu_kernel" in sources[0]
    assert "def _swiglu_kernel" in sources[0]


@pytest.mark.parametrize("others", [[], [Bf16()], [Int8WeightOnly()]], ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("name", FUSED)
def test_outputs_stay_what_they_were(name: str, mode: Any, others: list[Technique]) -> None:
    """Of int8, what the same stack without the fused kernels gives: it rounds in another place."""
    stack = [*others, *([TorchCompile(mode=mode)] if mode else [])]
    plain, fused = on_cuda(f"path:{name}", *stack), on_cuda(f"path:{name}", *FUSED[name], *stack)
    given = prompt().cuda()
    tokens = fused.generate(given, NEW_TOKENS).tokens
    sequence = torch.cat([given, tokens[:, :-1]], dim=1)
    reference = in_float64(
        on_cuda(f"path:{name}", *[other for other in others if isinstance(other, Bf16)]).model
    )
    bound = rounding_bound(reference, sequence, "bfloat16" if others == [Bf16()] else "float32")
    if others == [Int8WeightOnly()]:
        assert float((fused.logits(sequence) - plain.logits(sequence)).abs().max()) <= 2 * bound
        return
    assert float((fused.logits(sequence) - logits_of(reference, sequence)).abs().max()) <= bound
    assert_greedy_as_far_as_it_can_be_told(reference, given, tokens, bound)
