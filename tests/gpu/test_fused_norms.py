"""The fused norms and the attention kernels on an NVIDIA GPU."""

from typing import Any

import pytest
import torch

from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm
from optigpu.techniques.base import AttentionKernel, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.fused_attention import FusedAttention
from optigpu.techniques.kernels.fused_layernorm import FusedLayernorm
from optigpu.techniques.kernels.fused_rmsnorm import FusedRmsnorm
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.vocabulary import UnsupportedError
from tests.engine.decoded import NEW_TOKENS, assert_tokens_right
from tests.engine.rounding import in_float64
from tests.engine.test_ops_fused_norm import EPS, SHAPES, TYPES, assert_norm_of, operands
from tests.engine.tiny_models import FAMILIES, prompt
from tests.gpu.cuda_models import calls_of, on_cuda

FIRST = pytest.param((2, 5000), marks=pytest.mark.gpu_first)
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]
FUSED = {name: FusedLayernorm() if name in ("gpt2", "opt") else FusedRmsnorm() for name in FAMILIES}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, FIRST, (3, 2**16), (2, 2**16 + 1)], ids=str)
def test_the_kernel_agrees_with_float64(shape: tuple[int, ...], dtype: Any) -> None:
    x, residual, weight, bias = (tensor.cuda() for tensor in operands(shape, dtype))
    normed, summed = add_layer_norm(x, residual, weight, bias, EPS)
    assert summed.equal(x + residual)
    assert (normed.dtype, normed.shape) == (dtype, x.shape)
    assert_norm_of(normed, summed, weight, bias, is_rms=False)
    normed, summed = add_rms_norm(x, residual, weight, EPS)
    assert_norm_of(normed, summed, weight, None, is_rms=True)
    normed, same = add_layer_norm(x, None, None, None, EPS)
    assert same is x
    assert_norm_of(normed, x, None, None, is_rms=False)


def test_torch_compile_looks_into_the_operators() -> None:
    """Their launches are part of the graph, and its code calls no operator of ours."""
    x, residual, weight, _ = (tensor.cuda() for tensor in operands((4, 768), torch.bfloat16))

    def step() -> Any:
        return add_rms_norm(torch.relu(x), residual, weight, EPS)

    compiled = torch.compile(step, fullgraph=True)
    for one, other in zip(compiled(), step(), strict=True):
        torch.testing.assert_close(one, other)
    names = calls_of(compiled)
    assert any("_norm_row" in name for name in names)
    assert "optigpu::triton_add_norm" not in names


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_norms_decode_right_with_and_without_cuda_graphs(family: str, mode: Any) -> None:
    stack = [FUSED[family], *([TorchCompile(mode=mode)] if mode else [])]
    runtime, prompts = on_cuda(f"path:{family}", *stack), prompt().cuda()
    assert runtime.notes.facts["norm_backend"] == "triton"
    first = runtime.generate(prompts, NEW_TOKENS).tokens
    assert runtime.generate(prompts, NEW_TOKENS).tokens.equal(first)
    assert_tokens_right(runtime, in_float64(on_cuda(f"path:{family}").model), prompts, first)


@pytest.mark.parametrize(
    ("family", "kernel"),
    [(family, kernel) for family in FAMILIES for kernel in ("flash", "math")]
    # Heads of keys and values that several queries share are not for this one.
    + [(family, "memory_efficient") for family in ("gpt2", "opt")],
)
def test_fused_attention_runs_the_kernel_that_it_is_asked_for(family: str, kernel: AttentionKernel) -> None:
    """`observe` raises UnsupportedError when another one ran."""
    runtime = on_cuda(f"path:{family}", FusedAttention(kernel=kernel), Bf16())
    runtime.observe(prompt().cuda())
    assert runtime.notes.facts["attention_kernels"]


@pytest.mark.parametrize("stack", [[], [Bf16(), StaticKvCache()]], ids=["float32", "mask"])
def test_flash_says_what_it_cannot_take(stack: list[Technique]) -> None:
    runtime = on_cuda("path:gpt2", FusedAttention(kernel="flash"), *stack)
    with pytest.raises(UnsupportedError, match="cannot run its flash attention kernel"):
        runtime.generate(prompt().cuda(), NEW_TOKENS)
